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
# # Compare two selectors
#
# Both answered the same prompts, so they are compared in pairs. What makes a prompt hard is then
# the same on both sides, and the interval is narrower than that of two independent samples.

# %%
# %matplotlib inline
from pathlib import Path

from IPython.display import display

from experiments.study import figures, tables
from xsparse import stats
from xsparse.report import load

TABLES = Path("../results/published/cpu/knee")
A = {"selector": "xattention", "threshold": 0.0}
B = {"selector": "xattention", "threshold": 0.9}

# %% [markdown]
# ## The points there are

# %%
rows = tables.as_selected(tables.rows(TABLES))
sparse = load.without_repeats(load.split_dense(rows)[0])
columns = ["label", "task", "length", "n", "accuracy", "accuracy_low", "accuracy_high"]
display(sparse[[*columns, "mask_density"]].round(3))

# %% [markdown]
# ## B minus A, prompt by prompt
#
# `p` is the exact McNemar test where scores are 0 or 1, a sign-flip test elsewhere; `p_adjusted` is
# Holm over the lines of the table. The mean counts every task alike.

# %%
samples = tables.samples(TABLES)
a, b = (tables.unreduced(tables.where(samples, point)) for point in (A, B))
a, b = (lines[lines["mass_recall"].isna()] for lines in (a, b))
pairs = tables.paired(a, b)
display(pairs.round(3))

# %%
names = tuple(" ".join(str(value) for value in point.values()) for point in (A, B))
display(figures.differences(pairs, names))

# %% [markdown]
# ## What it costs
#
# A difference of accuracy means little without the densities beside it.

# %%
for name, lines in zip(names, (a, b), strict=True):
    for length, own in lines.groupby("length"):
        mean, low, high = stats.ratio_ci(own["mask_density"].tolist(), [1.0] * len(own))
        print(
            f"{name}, {length} tokens: density {mean:.3f} [{low:.3f}, {high:.3f}], n = {len(own)}"
        )

# %% [markdown]
# ## What n prompts can show
#
# The smallest true loss that the exact test finds with 80 % power, if nothing is gained.

# %%
for n in sorted({*pairs["n"], 25, 100, 500}):
    visible = stats.smallest_visible_loss(int(n))
    print(f"n = {n}: {'no loss of any size' if visible is None else f'{100 * visible:.0f} points'}")
