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
# # Explore a sweep
#
# What a sweep says about one question: how sparse may the mask be before answers are lost? All
# numbers come from the committed tables of a study (`experiments/study/README.md`); every one has
# its n and its 95 % interval.

# %%
# %matplotlib inline
from pathlib import Path

import pandas as pd
from IPython.display import display

from experiments.study import figures, tables
from xsparse.report import load
from xsparse.report import tables as report_tables
from xsparse.report.findings import findings, tolerances

TABLES = Path("../results/published/cpu/knee")
pd.set_option("display.max_colwidth", None)

# %% [markdown]
# ## What to know before believing a number
#
# The boxes on top of a report, for these rows.

# %%
for finding in findings(load.read(TABLES / "rows.parquet")):
    print(f"{finding.level}: {finding.title}. {finding.detail}\n")

# %% [markdown]
# ## Every point
#
# Dense first in each group; `delta` is sparse minus dense on the same prompts.

# %%
rows = tables.as_selected(tables.rows(TABLES))
sparse, dense = load.split_dense(rows)
dense = load.dense_reference(dense, sparse)
points = tables.shown(report_tables.summary(load.without_repeats(sparse), dense))
display(points.iloc[:, [0, 1, 2, 3, 4, 6, 7, 8]])

# %% [markdown]
# ## Accuracy against mask density, and against speed
#
# The front is the line of points that no other beats in both; the dashed line is dense. Times of a
# machine that was busy are not drawn.

# %%
for x in ("mask_density", "prefill_speedup"):
    try:
        display(*figures.pareto(rows, x).values())
    except ValueError as error:
        print(f"{x}: {error}")

# %% [markdown]
# ## Task by task
#
# Accuracy minus dense. A filled marker is a loss that was detected: the interval lies below 0, or p
# is below 0.05 after Holm. An open one is not the absence of a loss; the last column below says how
# large a loss these prompts could have shown.

# %%
for figure in figures.tolerance(rows).values():
    display(figure)
display(tables.shown(report_tables.tolerance(tolerances(sparse))))

# %% [markdown]
# ## The prompts that were lost
#
# Answers that dense attention gave and the sparsest point did not, with the depth of the needle.

# %%
samples = tables.samples(TABLES)
sparsest = sparse.sort_values("mask_density").iloc[0]
own = tables.where(samples, {column: sparsest[column] for column in tables.POINT})
lost = own[own["score"] < own["dense_score"]]
print(f"{sparsest['label']}: {len(lost)} of n = {len(own)} prompts score less than dense")
display(lost[["task", "length", "index", "depth", "score", "dense_score", "mask_density"]])
