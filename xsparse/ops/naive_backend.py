"""The operators from their definitions, slow: what the other backends are compared with."""
# ruff: noqa: F401 (a backend offers what it imports: xsparse.ops.OPERATORS)

from xsparse.ops.antidiagonal.naive import (
    antidiagonal_block_sums,
    antidiagonal_scores,
    antidiagonal_stats,
    merge_stats,
)
from xsparse.ops.attention.naive import (
    attention_mass,
    block_sparse_attention,
    dense_attention,
    dense_kernel,
)
from xsparse.ops.decode.naive import choose_tiles, fold_token, put_token, step_scores
from xsparse.ops.gather.naive import gather_tiles
from xsparse.ops.merge.naive import merge_states
from xsparse.ops.selection.naive import select_blocks
from xsparse.ops.tiles import block_lists, tiles_of_empty_row

name = "naive"
