"""Whether settings fit a model and a machine, from the model's shape alone, and each other.

A point is refused with this before anything is loaded, computed or written; `build` asks the same
for a model at hand. Imports no torch.
"""

from typing import Protocol

from xsparse.kv.gigabytes import from_gb, gb_up
from xsparse.selectors import Selector, parameters, thresholds
from xsparse.settings import Settings, refuse

MOST_SLOTS = 512  # tiles of a KV head that choose_tiles ranks in one program
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Shape(Protocol):
    """What a ModelShape and a CacheShape have in common."""

    @property
    def layers(self) -> int: ...
    @property
    def q_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def check(
    s: Settings, shape: Shape, *, device: str, dtype: str, tokens: int, model_name: str
) -> None:
    """Raises ValueError for settings that cannot run. device: as torch takes it; tokens: the
    longest sequence."""
    check_graph(s, device)
    make_selector(s, shape, model_name)
    if s.engine == "offload":
        number_bytes = NUMBER_BYTES[dtype]
        _check_host(s, shape, number_bytes, tokens)
        step_slots(s, shape, number_bytes)


def check_graph(s: Settings, device: str) -> None:
    kind = device.partition(":")[0]
    if s.cuda_graph != "none" and kind != "cuda":
        refuse("cuda_graph", s.cuda_graph, f"none on {kind}")


def make_selector(s: Settings, shape: Shape, model_name: str | None) -> Selector:
    """The prefill selector. Raises ValueError for a threshold table of another model, shape or
    method."""
    uses_it = "threshold" in parameters(s.selector)
    return s.method(
        thresholds(
            s.threshold,
            model=model_name,
            stride=s.stride,
            block_size=s.block_size,
            layers=shape.layers,
            q_heads=shape.q_heads,
            selector=s.selector if uses_it else None,
        )
    )


def step_slots(s: Settings, shape: Shape, number_bytes: int) -> int:
    """Tiles per layer, KV head and half (K or V) that decode keeps room for under offload: those
    of a step, or what the cache has. number_bytes: of a number of K and V."""
    if not s.decodes_sparsely:
        return 0
    step = s.decode_budget_tokens // s.block_size - 1  # the block being filled has its own place
    if not s.decode_cache_gb:
        return step
    if step > MOST_SLOTS:
        allowed = (
            f"< {(MOST_SLOTS + 2) * s.block_size} ({MOST_SLOTS + 2} blocks) with "
            f"decode_cache_gb={s.decode_cache_gb:g}; any with decode_cache_gb=0"
        )
        refuse("decode_budget_tokens", s.decode_budget_tokens, allowed)
    one = shape.layers * _block_bytes(s, shape, number_bytes)
    slots = from_gb(s.decode_cache_gb) // one
    if slots < step:
        need = f"0, or >= {gb_up(step * one)} for decode_budget_tokens={s.decode_budget_tokens}"
        refuse("decode_cache_gb", s.decode_cache_gb, need)
    return min(slots, MOST_SLOTS)


def selects_nothing(s: Settings) -> str | None:
    """What to say of a decode budget that the blocks which are always kept use up."""
    if not s.decodes_sparsely or s.decode_budget_tokens >= 4 * s.block_size:
        return None
    return (
        f"decode_budget_tokens={s.decode_budget_tokens}: block 0 and the two newest blocks take "
        f"all of it, so decode selects nothing; with >= {4 * s.block_size} it does"
    )


def without_effect(s: Settings, given: list[str]) -> list[str]:
    """Keys among Hydra's overrides that change no number of this point, nor of its baseline."""
    concerned = {*s.concerns(), *s.dense().concerns(), "seed"}  # a seed is also that of prompts
    concerned |= {"engine.host_memory_gb"} if s.engine == "offload" else set()
    keys = [override.lstrip("+").partition("=")[0] for override in given]
    known = {*s.__dataclass_fields__, "engine.host_memory_gb"}
    return [key for key in dict.fromkeys(keys) if key in known and key not in concerned]


def _check_host(s: Settings, shape: Shape, number_bytes: int, tokens: int) -> None:
    if s.host_memory_gb is None:
        return
    pages = -(-tokens // (s.block_size * s.block_size_ratio))
    block = _block_bytes(s, shape, number_bytes)
    need = shape.layers * pages * s.block_size_ratio * block
    if need > from_gb(s.host_memory_gb):
        allowed = f">= {gb_up(need)}, the GB of {tokens} tokens, or null for what is free"
        refuse("engine.host_memory_gb", s.host_memory_gb, allowed)


def _block_bytes(s: Settings, shape: Shape, number_bytes: int) -> int:
    """Bytes of a block of one layer that lie in host memory: V alone where K is resident."""
    halves = 1 if s.digest == "resident_k" else 2
    return halves * shape.kv_heads * s.block_size * shape.head_dim * number_bytes
