"""Binding a Session to a transformers decoder, through the library's own attention interface.

The attention function never sees the cache and `generate` refuses extra arguments, so the session
is bound to the model's attention modules while attached and everything is put back on exit.
Batches, padding, sliding windows and soft-capping are refused where they would be wrong.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from xsparse.attention import Session
from xsparse.kv.shape import CacheShape
from xsparse.models import check_supported

NAME = "xsparse"
# Keyword arguments that a decoder may hand to attention and that change nothing here.
HARMLESS = {"position_ids", "cache_position", "use_cache", "position_embeddings", "is_causal"}


class Binding:
    """A session and a model for the length of a block. running: inside a call of that model, the
    only place where a cache layer may give less than all keys."""

    def __init__(self, session: Session):
        self._session: Session | None = session
        self.running = False
        self.foreign: WeakSet[Cache] = WeakSet()  # caches of others that came with a sequence

    @property
    def session(self) -> Session:
        if self._session is None:
            raise ValueError("xsparse: the block that this cache belongs to was left")
        return self._session

    def held(self, sequence: int | None) -> Session:
        """The session, if it still holds that sequence (None: whichever it holds)."""
        if sequence not in (None, self.session.engine.sequence):
            raise ValueError("xsparse: this cache is of an earlier sequence, which is gone")
        return self.session

    def check_running(self) -> None:
        if not self.running:
            raise ValueError(
                "xsparse: call the attached model itself, not an inner module or another model"
            )

    def end(self) -> None:
        self._session = None


class SessionLayer(DynamicLayer):
    """A cache layer that keeps nothing itself: the engine does."""

    def __init__(self, binding: Binding, sequence: int | None, layer: int):
        super().__init__()
        self.binding, self.sequence, self.layer = binding, sequence, layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        self.binding.held(self.sequence)
        self.binding.check_running()
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        return self.binding.held(self.sequence).engine.lengths[self.layer]

    def reset(self) -> None:
        if self.layer == 0:  # called for each layer
            self.binding.held(self.sequence).reset()

    def crop(self, *args: Any) -> None:
        raise ValueError("xsparse: a cache cannot be cropped (assisted decoding is not supported)")

    reorder_cache = batch_repeat_interleave = batch_select_indices = crop  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("xsparse: a cache cannot be copied or saved; K and V are not in it")


class SessionCache(Cache):
    """What the model sees as its cache. sequence: the one it continues, by the engine's count;
    None: whichever the session is at, for who drives the session itself."""

    def __init__(self, binding: Binding, sequence: int | None):
        layers = range(binding.session.engine.shape.layers)
        super().__init__(layers=[SessionLayer(binding, sequence, i) for i in layers])
        self.binding, self.sequence = binding, sequence


def cache_shape(
    model: PreTrainedModel, *, block_size: int, block_size_ratio: int, chunk_size: int
) -> CacheShape:
    """The shape of a model's KV cache under a configuration."""
    config = model.config
    heads = config.num_attention_heads
    return CacheShape(
        layers=config.num_hidden_layers,
        q_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        block_size=block_size,
        block_size_ratio=block_size_ratio,
        chunk_size=chunk_size,
        dtype=model.dtype,
        device=model.device,
    )


@contextmanager
def bound(model: PreTrainedModel, session: Session) -> Iterator[SessionCache]:
    """The model attends through `session` inside the body; restored on exit, also after an error.

    A call that brings no cache of this session begins a new sequence and returns the cache that
    continues it. The cache that is yielded continues whatever the session holds. Raises ValueError
    for a model, a batch, a cache or an argument that is not supported.
    """
    check_supported(model.config, type(model))
    if getattr(model, "_xsparse_bound", False):
        raise ValueError("xsparse: the model is attached already; leave that context first")
    modules = _attention_modules(model)
    binding = Binding(session)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    before = model.config._attn_implementation
    key = cache_argument(model)
    hooks = (
        model.register_forward_pre_hook(_on_forward(binding, key), with_kwargs=True),
        model.register_forward_hook(_after_forward(binding), always_call=True),
    )
    try:
        model.config._attn_implementation = NAME
        model._xsparse_bound = True  # type: ignore[assignment]
        for module in modules:
            module._xsparse = binding  # type: ignore[assignment]
        yield SessionCache(binding, None)
    finally:
        binding.end()
        for hook in hooks:
            hook.remove()
        model.config._attn_implementation = before
        del model._xsparse_bound
        for module in modules:
            module.__dict__.pop("_xsparse", None)


def cache_argument(model: PreTrainedModel) -> str:
    """`cache` from transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    modules = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")]
    if not modules:
        raise ValueError(f"model={type(model).__name__}: no attention module with layer_idx")
    return modules


def _on_forward(binding: Binding, key: str):
    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None:
            ids = kwargs.get("inputs_embeds")
        if ids is not None and ids.shape[0] != 1:
            raise ValueError(f"xsparse: batch size {ids.shape[0]}: allowed is 1")
        if len(args) > 3:
            raise ValueError("xsparse: pass the cache by keyword, not by position")
        given = {name: kwargs.pop(name, None) for name in ("cache", "past_key_values")}
        brought = next((c for c in given.values() if c is not None), None)
        session, engine = binding.session, binding.session.engine
        if not isinstance(brought, SessionCache) or brought.binding is not binding:
            foreign = brought
            _check_foreign(foreign, binding)
            session.reset()
            brought = SessionCache(binding, engine.sequence)
            if foreign is not None:  # behind the block it would pass for one that is empty
                foreign.layers = brought.layers
        elif len(set(binding.held(brought.sequence).engine.lengths)) > 1:
            raise ValueError(
                "xsparse: the last forward did not finish; begin a new sequence (without its cache)"
            )
        if ids is not None:
            session.decoding = session.phase == "auto" and ids.shape[1] == 1 and (engine.length > 0)
        kwargs[key] = brought
        kwargs["use_cache"] = True
        binding.running = True
        return args, kwargs

    return hook


def _after_forward(binding: Binding):
    def hook(*_: Any) -> None:
        binding.running = False

    return hook


def _check_foreign(cache: Cache | None, binding: Binding) -> None:
    """`generate` brings an empty cache with each prompt; it holds nothing, for ours is used."""
    if cache is None:
        return
    if not isinstance(getattr(cache, "layers", None), list):
        raise ValueError(f"xsparse: a cache of type {type(cache).__name__} is not supported")
    if cache in binding.foreign:
        raise ValueError("xsparse: this cache holds nothing; pass the cache that the call returned")
    if cache.get_seq_length() or isinstance(cache, SessionCache):
        raise ValueError("xsparse: a filled cache of another kind cannot be continued")
    binding.foreign.add(cache)


def _mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """No mask: causality is the engine's. A 2-D mask with a zero means padding."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("xsparse: padded input is not supported; pass one unpadded sequence")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: [1, q_heads, C, d]; key, value: [1, kv_heads, C, d] -> [1, C, q_heads, d]."""
    binding = module.__dict__.get("_xsparse")
    if binding is None:
        raise ValueError("xsparse: this model is not attached")
    layer: int = module.layer_idx  # type: ignore[assignment]
    unknown = [n for n, x in kwargs.items() if x is not None and n not in HARMLESS]
    if unknown:
        raise ValueError(
            f"xsparse: attention argument {unknown[0]}={kwargs[unknown[0]]} is not "
            "supported (sliding windows and soft-capping are refused)"
        )
    if attention_mask is not None:
        raise ValueError("xsparse: explicit attention masks are not supported")
    if dropout:
        raise ValueError(f"xsparse: dropout={dropout}: allowed is 0 (call model.eval())")
    if query.requires_grad:
        raise ValueError("xsparse: gradients are not supported; use torch.no_grad()")
    binding.check_running()
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = binding.session.attend(layer, query[0], key[0], value[0], scale)
    return out.transpose(0, 1).unsqueeze(0), None
