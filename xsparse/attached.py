"""Library use: sparse attention on any supported decoder for the length of a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xsparse.attention import Session
from xsparse.build import build
from xsparse.counters import density
from xsparse.hf import bound
from xsparse.settings import Settings, check_type, refuse


class Stats:
    """What the current (or last) sequence cost; read at any time, also after the block.

    Reading waits for the device. Densities are None where there is nothing to divide by.
    """

    def __init__(self, session: Session):
        self._session: Session | None = session
        self._offload = session.engine.name == "offload"
        self._last: dict[str, Any] = {}

    def freeze(self) -> None:
        """Keep the numbers as they are now and let go of the session and its memory."""
        self._last = self.numbers
        self._session = None

    def __repr__(self) -> str:
        shown = ("mask_density", "page_density", "executed_density", "decode_density")
        return f"Stats({', '.join(f'{name}={getattr(self, name)}' for name in shown)})"

    @property
    def numbers(self) -> dict[str, Any]:
        """Every counter by name (docs/results.md), and seconds by stage."""
        if self._session is None:
            return self._last
        counters = self._session.counters
        return {**counters.read(), "stages_s": counters.stages_s()}

    def _ratio(self, kept: str, of: str) -> float | None:
        return density(self.numbers.get(kept), self.numbers.get(of))

    @property
    def mask_density(self) -> float | None:
        return self._ratio("mask_kept", "mask_causal")

    @property
    def page_density(self) -> float | None:
        return self._ratio("pages_moved", "pages_history")

    @property
    def executed_density(self) -> float | None:
        return self._ratio("executed", "mask_causal")

    @property
    def decode_density(self) -> float | None:
        return self._ratio("decode_tiles_kept", "decode_tiles")

    @property
    def transfer_ratio(self) -> float | None:
        """None with the resident engine, which moves nothing."""
        if not self._offload:
            return None
        return self._ratio("bytes_h2d", "bytes_history")

    @property
    def bytes_h2d(self) -> int:
        """Bytes host to device in prefill (`numbers["decode_bytes_h2d"]`: in decode)."""
        return self.numbers.get("bytes_h2d", 0)

    @property
    def bytes_d2h(self) -> int:
        return self.numbers.get("bytes_d2h", 0)


@contextmanager
def attach(
    model: Any, selector: str = "xattention", *, offload: bool = False, **settings: Any
) -> Iterator[Stats]:
    """Let `model` attend through xsparse inside the block, `model.generate` included.

    model: a transformers decoder (llama, mistral, qwen2, qwen3 families); selector: a registered
    name; offload: K and V in host memory; settings: the fields of `xsparse.settings.Settings`
    (threshold, stride, block_size, chunk_size, decode_selector, ...), other names being options
    of the selector. One unpadded sequence at a time: the cache that a call returns goes on with
    it, until another begins or the block is left. Yields Stats; the model is restored on exit, also
    after an exception. Raises ValueError, in one line, for what is not supported, and MemoryError,
    when a prompt comes, if K and V do not fit in host memory or in host_memory_gb.
    """
    for key, instead in (
        ("engine", "offload=True"),
        ("selector_options", "the options themselves"),
    ):
        if key in settings:
            raise ValueError(f"{key}={settings[key]}: allowed is {instead}")
    check_type("offload", offload, bool)
    _check_graph(settings.get("cuda_graph", "none"), model.device.type, offload)
    fields = Settings.__dataclass_fields__
    known = {key: value for key, value in settings.items() if key in fields}
    options = {key: value for key, value in settings.items() if key not in fields}
    engine = "offload" if offload else "resident"
    session = build(
        model, Settings(selector=selector, engine=engine, selector_options=options, **known)
    )
    stats = Stats(session)
    try:
        with bound(model, session):
            yield stats
    finally:
        stats.freeze()
        session.engine.close()


def _check_graph(value: Any, device: str, offload: bool) -> None:
    """Before anything is built. `generate` runs step by step, so a whole step is no graph here."""
    if device != "cuda" and value != "none":
        refuse("cuda_graph", value, f"none on {device}")
    if value not in (("none", "pair") if offload else ("none",)):
        refuse("cuda_graph", value, "none, or pair with offload=True")
