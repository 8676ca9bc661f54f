"""Models: where weights come from, what identifies them, and how they get into memory.

`fetch` and `shape` need neither torch nor transformers; `load` imports both when called.
"""

from xsparse.models.fetching import ModelFiles, fetch, shape
from xsparse.models.files import ModelError, cache_dir
from xsparse.models.loading import Loaded, load, load_tokenizer
from xsparse.models.node import ModelNode
from xsparse.models.shapes import ModelShape
from xsparse.models.support import check_supported

__all__ = [
    "Loaded",
    "ModelError",
    "ModelFiles",
    "ModelNode",
    "ModelShape",
    "cache_dir",
    "check_supported",
    "fetch",
    "load",
    "load_tokenizer",
    "shape",
]
