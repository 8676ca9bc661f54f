"""Selection methods: one file each, a registry, and the reductions of what they select.

Importing this does not import torch, so a configuration is checked before that is paid for.
"""

from xsparse.selectors.base import KeyView, MassSelector, Selection, Selector, Site, TensorKeys
from xsparse.selectors.registry import build, get, names, parameters, register
from xsparse.selectors.threshold import thresholds

__all__ = [
    "KeyView",
    "MassSelector",
    "Selection",
    "Selector",
    "Site",
    "TensorKeys",
    "build",
    "get",
    "names",
    "parameters",
    "register",
    "thresholds",
]
