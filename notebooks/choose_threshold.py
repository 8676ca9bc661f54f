# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Choose a threshold for your model
#
# Two ways. A sweep says which single threshold loses nothing that could be seen. Calibration gives
# each layer and query head a threshold of its own, from true attention on prompts that no
# evaluation uses (`docs/selectors.md`).

# %%
# %matplotlib inline
import json
import tempfile
from pathlib import Path

import pandas as pd
import torch
from IPython.display import display

import xsparse
from experiments.study import anatomy, tables
from xsparse import cli, models, tasks
from xsparse.calibrate.__main__ import main as calibrate_command
from xsparse.config import register
from xsparse.report import load
from xsparse.report import tables as report_tables
from xsparse.report.findings import tolerances

TABLES = Path("../results/published/cpu/knee")
pd.set_option("display.max_colwidth", None)
MODEL = "smollm2-135m-lc"
BLOCK_SIZE = 32
OUT = Path(tempfile.mkdtemp()) / f"thresholds-{MODEL}.json"  # anywhere

# %% [markdown]
# ## From a sweep
#
# The sparsest point of each task and length whose loss was not detected, and what n prompts could
# have shown.

# %%
rows = tables.as_selected(tables.rows(TABLES))
own = load.split_dense(rows)[0].query("selector == 'xattention'")
display(tables.shown(report_tables.tolerance(tolerances(own))))

# %% [markdown]
# ## Per head
#
# What a shell runs as `python -m xsparse.calibrate model=... out=...`. One prompt of 512 tokens is
# enough to show the way; take the tasks and lengths that matter to you, and several prompts.

# %%
arguments = [f"model={MODEL}", "task=niah_single_2", "length=512", "samples=1", "held_out=1"]
arguments += [f"block_size={BLOCK_SIZE}", "coverage=0.9", f"out={OUT}"]
assert calibrate_command(arguments) == 0

# %%
content = json.loads(OUT.read_text())
display(anatomy.draw_thresholds(content))

# %% [markdown]
# ## What the table gains
#
# On held-out prompts, against the least single threshold that keeps as many blocks. `covered` is
# the share of rows that keep 0.9 of their true mass. With n = 1 held-out prompt there is no
# interval: raise `held_out` before believing a difference.

# %%
held_out = content["held_out"]
print(f"n = {len(held_out['prompt_hashes'])} held-out prompt")
display(
    pd.json_normalize(held_out["by_quantile"])
    .drop(columns=["more_recall", "more_covered"])
    .round(3)
)

# %% [markdown]
# ## Use it
#
# `threshold=@FILE` on the command line or here. Whether answers gain is for a sweep to say:
# `python run.py -m threshold=@FILE,0.96 ...`.

# %%
register()
config = cli.compose([f"model={MODEL}"])
loaded = models.load(config.model, dtype="float32", device="cpu")
task = tasks.build("niah_single_2", loaded.tokenizer, length=512, seed=0, node=config.task)
ids = torch.tensor([task.sample(0).input_ids])
with (
    torch.inference_mode(),
    xsparse.attach(
        loaded.model, selector="xattention", threshold=f"@{OUT}", block_size=BLOCK_SIZE
    ) as counted,
):
    loaded.model(input_ids=ids, logits_to_keep=1)
print(f"mask density {counted.mask_density:.3f} on n = 1 prompt of {ids.shape[1]} tokens")
