"""Shape of a KV cache and the arithmetic of blocks and pages."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CacheShape:
    """Everything an engine must know about a model and a configuration.

    block_size, chunk_size in tokens; block_size_ratio in blocks per page.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    block_size_ratio: int
    chunk_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def page_size(self) -> int:
        return self.block_size * self.block_size_ratio

    @property
    def tile_bytes(self) -> int:
        return self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def page_bytes(self, halves: int) -> int:
        """Bytes of a page of one layer: K and V, or one of them."""
        return halves * self.kv_heads * self.block_size_ratio * self.tile_bytes

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
