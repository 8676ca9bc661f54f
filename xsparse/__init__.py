"""xsparse: accuracy, density and speed of sparse attention, measured together.

with xsparse.attach(model, selector="xattention", threshold=0.9) as stats:
    model.generate(...)
stats.mask_density
"""

from typing import Any

__all__ = ["attach"]


def __getattr__(name: str) -> Any:
    if name == "attach":
        from xsparse.attached import attach

        return attach
    raise AttributeError(name)
