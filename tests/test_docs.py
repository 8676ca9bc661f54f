"""The README and docs/ say what is so: commands, keys, files, columns, numbers, imports.

Whatever stands in code type is checked against the code: `python run.py ...` is composed by the
real command line, `key=value` must be a key, a path must exist, Python is run.
"""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xsparse import cli
from xsparse.config import Config, register

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
each_page = pytest.mark.parametrize("page", TEXT)


@pytest.fixture(scope="module", autouse=True)
def schema():
    register()


def fenced(page: str, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(TEXT[page]) if name == language]


def code_lines(page: str) -> list[str]:
    """Lines of code, fenced or indented, without their comments."""
    text = TEXT[page]
    lines = [line for body in fenced(page, "bash") for line in body.splitlines()]
    lines += re.findall(r"^    (\S.*)$", FENCE.sub("", text), re.MULTILINE)
    return [re.sub(r"\s\s+.*|\s+# .*", "", line) for line in lines]


def spans(page: str) -> list[str]:
    """What stands between backticks in running text."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", TEXT[page]))


def commands(start: str) -> list[tuple[str, str]]:
    return [
        (page, line)
        for page in TEXT
        for line in dict.fromkeys(code_lines(page) + spans(page))
        if line.startswith(start)
    ]


# Commands


@pytest.mark.parametrize(("page", "line"), commands("python run.py"))
def test_every_run_command_composes(page, line):
    flags, overrides = cli.split(shlex.split(line)[2:])
    overrides = [o for given in overrides for o in cli.name_model(given)]
    assert set(flags) <= cli.MULTIRUN
    points = cli.expand(overrides) if flags else [overrides]
    assert len(points) > 1 or not flags
    for point in points:
        cli.compose(point)


def test_the_commands_of_the_readme_run_dry(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert cli.main(["threshold=0.8,0.9", "-m", "dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert "threshold=0.8" in out
    assert "threshold=0.9" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("page", "line"), commands("python -m "))
def test_every_module_command_exists(page, line):
    module = shlex.split(line)[2]
    spec = importlib.util.find_spec(module)
    assert spec is not None, line
    if spec.submodule_search_locations:
        assert importlib.util.find_spec(f"{module}.__main__"), line


def test_make_targets_and_variables_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = {line.split()[1] for _, line in commands("make ")}
    assert targets == {"run", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    for variable in ("TORCH_INDEX", "PYTHON"):
        assert variable in TEXT["README.md"]
        assert re.search(rf"^{variable} \?=", makefile, re.MULTILINE)


def test_extras_and_python_versions_are_those_of_the_project():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"\.\[(\w+)\]", TEXT["README.md"]))
    assert named <= set(project["optional-dependencies"])
    assert named >= {"slurm", "ray", "optuna"}
    assert project["requires-python"] == ">=3.11"


def test_exit_codes_are_those_of_the_code():
    from xsparse import sweep

    codes = re.search(r"\*\*Exit codes\.\*\*(.*?)\n\n", TEXT["README.md"], re.DOTALL)
    assert codes
    stated = [int(code) for code in re.findall(r"\b(\d+):", codes[1])]
    assert stated == [sweep.OK, cli.BAD_INPUT, sweep.FAILED, cli.INTERRUPTED]


# Python


@pytest.mark.parametrize("page", [page for page in TEXT if page != "docs/selectors.md"])
def test_python_runs(page):  # tests/selectors runs the selector of docs/selectors.md
    import torch

    from tests.families import prompt, tiny

    for body in fenced(page, "python"):
        with torch.inference_mode():
            exec(compile(body, page, "exec"), {"model": tiny("llama"), "ids": prompt(300)})


def test_attach_has_the_defaults_that_the_readme_names():
    from xsparse.settings import Settings

    own, point = Settings(), Config(selector={"name": "full"}, task=cli.compose([]).task)
    differ = {
        f.name: getattr(own, f.name)
        for f in fields(Settings)
        if hasattr(point, f.name)
        and f.name not in ("selector", "engine")
        and getattr(own, f.name) != getattr(point, f.name)
    }
    stated = re.search(
        r"defaults are those of the table but for (.*?)\.\s", TEXT["README.md"], re.S
    )
    assert stated
    found = re.findall(r"`(\w+)` \(([\d,]+)\)", stated[1])
    assert {key: int(value.replace(",", "")) for key, value in found} == differ


# Keys


def table(first: str, nth: int = 0) -> list[list[str]]:
    """Cells of the nth table of the README whose header begins with `first`."""
    tables = re.findall(r"(?:^\|.*\n)+", TEXT["README.md"], re.MULTILINE)
    chosen = [t for t in tables if t.startswith(f"| {first} |")][nth]
    return [[c.strip() for c in row.strip("|").split(" | ")] for row in chosen.splitlines()[2:]]


def plain(cell: str) -> Any:
    import yaml

    return yaml.safe_load(cell.replace("`", ""))


GROUPS = ("model", "selector", "task", "engine", "tracker")
KEYS = {cells[0].strip("|` "): cells[1:] for cells in table("key")}


def test_the_table_names_every_key_with_its_default():
    keys = [f.name for f in fields(Config)]
    assert sorted(KEYS) == sorted([*keys, "experiment"])
    default = cli.compose([])
    for key, (shown, *_) in KEYS.items():
        if key in GROUPS:
            chosen = getattr(default, key)
            assert plain(shown) == (chosen["name"] if key == "selector" else chosen.name)
        elif key == "length":
            assert [plain(shown)] == default.length
        elif key != "experiment":
            assert plain(shown) == getattr(default, key), key


@pytest.mark.parametrize("group", [*GROUPS, "experiment"])
def test_the_table_names_every_choice_of_a_group(group):
    files = sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))
    assert re.findall(r"`([^`]+)`", KEYS[group][1]) == files


@pytest.mark.parametrize("key", [key for key in KEYS if key not in (*GROUPS, "experiment")])
def test_the_table_names_what_is_allowed(key):
    allowed = KEYS[key][1]
    words = re.findall(r"`([^`]+)`", allowed)
    if len(words) > 1:
        assert refused(f"{key}=no_such", "engine=offload") == " | ".join(words)
    elif low := re.fullmatch(r">= (\d+)", allowed):
        assert refused(f"{key}={int(low[1]) - 1}") == allowed
        cli.compose([f"{key}={low[1]}", "stride=1", "block_size=1", "task=niah_single_1"])
    elif allowed.startswith(("a divisor of", "a multiple of")):
        assert re.sub("`", "", allowed) in str(refused(f"{key}=96"))
    elif key == "decode_budget_tokens":
        minmax = "decode_selector=minmax"
        assert allowed == ">= 3 blocks"
        assert str(refused(f"{key}=383", minmax)).startswith(">= 384")
        cli.compose([f"{key}=384", minmax])
    elif allowed == "true or false":
        default = getattr(cli.compose([]), key)
        assert isinstance(default, bool)
    elif key == "length":
        assert refused(f"{key}=x") == allowed
    elif key == "threshold":
        assert refused(f"{key}=2") == allowed
    else:
        assert key == "results"


def refused(*overrides: str) -> str:
    """What the refusal of a value says is allowed."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        cli.compose(list(overrides))
    assert cli._is_bad_input(caught.value), caught.value
    return cli.one_line(caught.value).partition("allowed is ")[2]


def test_the_table_of_group_keys_is_complete():
    default = cli.compose([])
    shown = {cells[0].strip("|` "): cells[1] for cells in table("key", 1)}
    there: dict[str, Any] = {}
    for group in GROUPS:
        node = getattr(default, group)
        values = vars(node) if is_dataclass(node) else node
        there |= {f"{group}.{key}": value for key, value in values.items()}
    assert {key: plain(value) for key, value in shown.items()} == there


def test_the_parameters_of_selectors_are_named():
    import yaml

    for path in (ROOT / "conf" / "selector").glob("*.yaml"):
        own = yaml.safe_load(path.read_text())
        for key in set(own) - {"name"}:
            line = f"`selector.{key}` ({str(own[key]).lower()})"
            assert line in TEXT["README.md"], line


@each_page
def test_every_assignment_in_code_type_is_to_a_key(page):
    known = {f.name for f in fields(Config)} | {"experiment"}
    groups = {cells[0].strip("|` ") for cells in table("key", 1)}
    groups |= {"selector.density", "selector.per_kv_head_chunk"}
    for span in spans(page):
        for key in re.findall(r"(?:^|\s)\+?([a-z_.]+)=(?=\S)", span):
            assert key in known | groups, f"{key} in `{span}`"


# Files and links


@each_page
def test_links_lead_somewhere(page):
    here = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXT[page]):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (here / path).resolve() if path else ROOT / page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert anchor in slugs, (link, slugs)


PLACES = ("conf/", "docs/", "experiments/", "notebooks/", "tests/", "xsparse/")
SHORT = ("ops/", "kv/", "store/", "selectors/", "models/", "tasks/", "report/")


@each_page
def test_files_that_are_named_exist(page):
    for span in spans(page):
        name = span.removesuffix("/").partition(":")[0]
        if "<" in name or not re.fullmatch(r"[\w./*-]+", name):
            continue
        if f"{name}/".startswith(PLACES):
            assert list(ROOT.glob(name)), span
        elif name.startswith(SHORT) and name.endswith(".py"):
            assert (ROOT / "xsparse" / name).exists(), span
        elif re.fullmatch(r"\w+\.(py|txt|toml)", name):
            assert list(ROOT.glob(name)) or list((ROOT / "xsparse").rglob(name)), span


def test_the_tree_of_the_readme_exists():
    text = TEXT["README.md"].partition("## Where things are")[2].partition("\n## ")[0]
    inside = ROOT
    for line in re.findall(r"^    ( *)(\S.*)$", text, re.MULTILINE):
        indent, rest = line
        inside = ROOT / "xsparse" if indent else ROOT
        for name in re.split(r"\s\s+", rest)[0].split():
            assert (inside / name).exists() or name == "results/", name  # made by the first run


# Results


def test_the_columns_of_a_row_are_named():
    from xsparse.rows import COLUMNS

    text = TEXT["docs/results.md"].partition("## Columns of a row")[2].partition("\n- ")[0]
    named = [word for span in re.findall(r"`([^`]+)`", text) for word in span.split()]
    assert sorted(named) == sorted(COLUMNS)


def test_the_fields_of_a_sample_are_named():
    import torch

    from tests.families import prompt, tiny
    from xsparse.build import build
    from xsparse.measure import measured
    from xsparse.settings import Settings
    from xsparse.tasks import Sample

    text = TEXT["docs/results.md"].partition("## One line of samples.jsonl")[2]
    shown = json.loads(text[: text.index("The numbers above")])
    model = tiny("llama")
    loaded: Any = SimpleNamespace(
        model=model, eos_ids=(2,), tokenizer=SimpleNamespace(decode=lambda ids, **_: "")
    )
    small: dict[str, Any] = {"block_size": 16, "block_size_ratio": 2, "chunk_size": 32, "stride": 4}
    session = build(model, Settings(**small, engine="offload", mass_recall=True))
    ids = prompt(100)[0].tolist()
    with torch.inference_mode(), measured(loaded, session) as bench:
        record = bench.run(Sample("niah", 128, 0, ids, ["1"], 4, "all", "", {}))
    assert set(record) == set(shown)
    assert set(record["counters"]) == set(shown["counters"])
    assert set(record["stages_s"]) == set(shown["stages_s"])


def test_the_sources_of_an_identity_are_named():
    from xsparse.store import SOURCE_PARTS

    found = re.search(r"`xsparse/` of\s+`([^`]+)`", TEXT["docs/results.md"].replace("\n", " "))
    assert found
    assert sorted(found[1].split()) == sorted(part.removesuffix(".py") for part in SOURCE_PARTS)


# The drawing of the four densities


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("densities", ROOT / "docs/img/densities.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawing_is_up_to_date(drawing):
    assert drawing.draw() == (ROOT / "docs/img/densities.svg").read_text(encoding="utf-8")


def test_the_densities_of_the_drawing(drawing):
    """The page against xsparse, and both against a count by hand."""
    stats = drawing.measured("ring")
    text = TEXT["docs/design.md"]
    stated = dict(re.findall(r"^\| `(\w+)` \| [^|`]* \| [^|]*?([\d.]+) % \|$", text, re.M))
    names = ("mask_density", "page_density", "transfer_ratio", "executed_density")
    assert stated == {name: f"{100 * getattr(stats, name):.1f}" for name in names}
    # kept: 24 marks in the drawing; causal: 4 heads x (9 + 10) blocks
    assert stats.mask_density == stats.executed_density == 24 / 76
    assert stats.page_density == 3 / 4  # pages {0, 1}, {2, 3}, {6, 7} of 4
    assert stats.transfer_ratio == 3 / 4 / 2  # V only
    assert drawing.measured("gather").transfer_ratio == 6 / 16 / 2  # {0, 2, 3} and {0, 6, 7}


def test_the_other_keys_of_the_drawing(drawing):
    row = r"^\| `(ring|gather)` \| `(\w+)` \| `(\w+)` \| ([\d.]+) % \| ([\d.]+) % \|$"
    rows = re.findall(row, TEXT["docs/design.md"], re.MULTILINE)
    assert len(rows) == 6
    for transfer, digest, attend, moved, executed in rows:
        stats = drawing.measured(transfer, attend, digest)
        assert f"{100 * stats.transfer_ratio:.1f}" == moved
        assert f"{100 * stats.executed_density:.1f}" == executed


def test_the_drawing_agrees_with_the_reductions(drawing):
    import torch

    from xsparse.selectors import Selection
    from xsparse.selectors.reduce import reduce_mask

    mask = torch.tensor(
        [[[b in row for b in range(drawing.BLOCKS)] for row in rows] for rows in drawing.KEPT]
    )
    for transfer, tiles in (("gather", [{0, 2, 3}, {0, 6, 7}]), ("ring", [{0, 1, 2, 3, 6, 7}])):
        reduced = reduce_mask(
            Selection(mask),
            q_start=drawing.HISTORY,
            block_size=1,
            ratio=drawing.RATIO,
            kv_heads=drawing.KV_HEADS,
            transfer=transfer,
            threshold=1.0,
        )
        assert [set(row.nonzero().flatten().tolist()) for row in reduced.tiles] == [
            own | {8, 9} for own in tiles
        ]
        assert reduced.pages.tolist() == [True, True, False, True]


def test_the_operators_that_are_named_exist():
    from xsparse.ops import torch_backend

    text = TEXT["docs/design.md"].partition("## Operators")[2].partition("\n## ")[0]
    names = re.findall(r"^    (\w+)\(", text, re.MULTILINE)
    assert len(names) == 14
    assert not [name for name in names if not hasattr(torch_backend, name)]


# Imports go one way


# Each line may import what stands above it, in its own line only itself.
LEVELS = (
    "ops counters store stats tracking progress models tasks points",
    "selectors",
    "kv device rows settings",
    "steps graph_pair config report fit",
    "attention",
    "hf plan step_graph prompts",
    "build measure",
    "attached runner calibrate",
    "sweep dry_run",
    "cli",
)
LEVEL = {room: level for level, line in enumerate(LEVELS) for room in line.split()}
# What these import of the levels above them, and no more.
ONLY = {
    "kv": {"ops", "selectors"},
    "attention": {"counters", "kv", "ops", "selectors", "steps"},
    "steps": {"counters", "kv", "ops"},
    "selectors": {"ops"},
    "report": {"rows", "stats", "store"},
    "rows": {"stats"},
}


def imported(file: Path) -> set[str]:
    """Modules of the package that a file imports anywhere, without the package's name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "xsparse":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xsparse."):
            found.add((node.module or "").removeprefix("xsparse."))
    return found


def test_imports_go_one_way():
    package = ROOT / "xsparse"
    for file in package.rglob("*.py"):
        room = file.relative_to(package).parts[0].removesuffix(".py")
        if file.name == "__main__.py" or room == "__init__":  # entrances, which may use everything
            continue
        for module in imported(file):
            other = module.partition(".")[0]
            if other == room:
                continue
            assert LEVEL[other] < LEVEL[room], f"{file} imports {module}"
            assert other in ONLY.get(room, {other}), f"{file} imports {module}"
            if room == "kv" and other == "selectors":
                assert module == "selectors.base", f"{file} imports {module}"


def test_every_room_has_a_level():
    there = {path.stem for path in (ROOT / "xsparse").iterdir() if not path.name.startswith("_")}
    assert there == set(LEVEL)


def test_what_stores_and_shows_needs_no_torch():
    rooms = ("config", "settings", "models", "plan", "report", "rows", "selectors", "stats")
    rooms += ("store", "tasks", "tracking")
    code = (
        f"import sys, {', '.join(f'xsparse.{room}' for room in rooms)}\n"
        "print(sorted({'torch', 'transformers', 'triton', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n", done.stderr
