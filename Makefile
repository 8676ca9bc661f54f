# make run    sets up what is missing and runs the default point (ARGS="threshold=0.8,0.9 -m")
# make test   sets up what is missing and runs linters, type checker and tests
#
# PYTHON=python3.12             another interpreter (3.11 to 3.13)
# TORCH_INDEX=URL               a package index of torch builds, for example PyTorch's CPU index
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet

.PHONY: run test setup model lock clean

run: setup
	$(VENV)/bin/python run.py $(ARGS)

test: $(VENV)/.dev model
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/python -m pytest $(ARGS)

setup: $(VENV)/.installed model

model: $(VENV)/.installed
	$(VENV)/bin/python -m xsparse.models fetch

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

# The versions that the tests ran with. triton is left to torch, whose builds differ.
lock: $(VENV)/.dev
	$(VENV)/bin/python -m pip freeze --exclude-editable --exclude triton --exclude pip \
	    | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf $(VENV)
