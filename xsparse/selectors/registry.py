"""Selection methods by name.

A method registers itself with `@register`; the project's own are listed in METHODS, so a new one
is a file here and a word there. Others register from wherever they are imported.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import fields
from typing import Any

from xsparse.selectors.base import Selector

# Keys of the configuration's top level, offered to every method whether it has them or not.
SHARED = ("threshold", "stride", "seed")

METHODS = ("full", "xattention", "strided_k", "minmax", "block_mean", "random", "oracle_topp")

_registered: dict[str, type[Selector]] = {}


def register(cls: type[Selector]) -> type[Selector]:
    """Class decorator: make the method available under its name. ValueError if that is taken."""
    if cls.name in _registered:
        raise ValueError(f"selector={cls.name}: taken by {_registered[cls.name].__module__}")
    _registered[cls.name] = cls
    return cls


def names() -> list[str]:
    """Every method that can be built."""
    _import_methods()
    return sorted(_registered, key=lambda n: METHODS.index(n) if n in METHODS else len(METHODS))


def get(name: str) -> type[Selector]:
    """The class of a method. Raises ValueError listing the names."""
    _import_methods()
    if name not in _registered:
        raise ValueError(f"selector={name}: allowed is {' | '.join(names())}")
    return _registered[name]


def parameters(name: str) -> list[str]:
    """Names of the parameters a method has."""
    return [f.name for f in fields(get(name)) if f.init]  # pyright: ignore[reportArgumentType]


def build(name: str, **params: Any) -> Selector:
    """A method with those of the parameters that it has.

    Raises ValueError for a value out of range, and for a parameter that neither the method has nor
    every method is offered.
    """
    known = parameters(name)
    for key in params:
        if key not in known and key not in SHARED:
            own = " | ".join(k for k in known if k not in SHARED) or "none"
            near = difflib.get_close_matches(key, [*known, *SHARED], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"selector.{key}: parameters of {name} are: {own}{hint}")
    return get(name)(**{key: value for key, value in params.items() if key in known})


def _import_methods() -> None:
    for method in METHODS:
        importlib.import_module(f"xsparse.selectors.{method}")
