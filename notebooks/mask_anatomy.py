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
# # Anatomy of a mask
#
# One layer of the default model on one prompt: what the selector estimates, which blocks it keeps,
# and where the attention mass really is. The model runs here, on the CPU, with dense attention, so
# estimate and truth come from the same queries and keys. One prompt shows how a mask comes about;
# it has n = 1 and no interval, and is no measurement of a method.

# %%
# %matplotlib inline
import pandas as pd
from IPython.display import display

from experiments.study import anatomy
from xsparse import stats

LAYER = 12
THRESHOLD = 0.9

# %% [markdown]
# Blocks of 32 tokens instead of the default 128, so that a prompt of 1,024 tokens has enough of
# them.

# %%
layer = anatomy.observe(LAYER, task="niah_single_2", length=1024, block_size=32)
print(f"{layer.prompt}: {layer.tokens} tokens, {layer.scores.shape[-1]} blocks")
print(f"needle in block {layer.needle_block}, question in block {layer.question_block}")

# %% [markdown]
# ## Heads differ
#
# `needle` is the share of the question's row that lies on the needle's block.

# %%
at_needle = layer.mass[:, layer.question_block, layer.needle_block]
heads = pd.DataFrame(
    {
        "density": layer.density(THRESHOLD).tolist(),
        "mass recall": layer.recall(THRESHOLD).tolist(),
        "needle": (at_needle / layer.mass[:, layer.question_block].sum(-1)).tolist(),
        "needle kept": layer.mask(THRESHOLD)[:, layer.question_block, layer.needle_block].tolist(),
    }
)
heads.index.name = "query head"
display(heads.round(3))

# %% [markdown]
# ## The head that looks at the needle most
#
# Block 0 and the diagonal are always kept; the rest is taken from the largest estimated share down,
# until the row holds the threshold.

# %%
looking = int(heads["needle"].idxmax())
display(anatomy.draw(layer, looking, THRESHOLD))

# %% [markdown]
# ## Density buys mass
#
# Means over the heads of this layer. The interval is over heads of one prompt, not over prompts.

# %%
lines = []
for threshold in (0.0, 0.3, 0.6, 0.9):
    line = {"threshold": threshold, "n heads": len(heads)}
    for name, values in (
        ("density", layer.density(threshold)),
        ("mass recall", layer.recall(threshold)),
    ):
        mean, low, high = stats.ratio_ci(values.tolist(), [1.0] * len(values))
        line[name] = f"{mean:.3f} [{low:.3f}, {high:.3f}]"
    lines.append(line)
display(pd.DataFrame(lines))
