"""The operators in plain torch: what runs on a CPU, and anywhere else if asked."""
# ruff: noqa: F401 (a backend offers what it imports: xsparse.ops.OPERATORS)

from xsparse.ops.antidiagonal.fast import (
    antidiagonal_block_sums,
    antidiagonal_scores,
    antidiagonal_stats,
    merge_stats,
)
from xsparse.ops.attention.dense import dense_attention, dense_kernel
from xsparse.ops.attention.fast import attention_mass, block_sparse_attention
from xsparse.ops.decode.naive import choose_tiles, fold_token, put_token, step_scores
from xsparse.ops.gather.naive import gather_tiles
from xsparse.ops.merge.naive import merge_states
from xsparse.ops.selection.fast import select_blocks
from xsparse.ops.tiles import block_lists, tiles_of_empty_row

name = "torch"
