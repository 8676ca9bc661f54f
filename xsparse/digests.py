"""Which digest a selector works on when K is offloaded. Imports no torch."""

from typing import Any

# What decode by block bounds and the exact-mass diagnostic can read.
DECODE_MINMAX = ("minmax", "resident_k")
MASS_RECALL = ("streamed", "resident_k")


def choose_digest(
    selector: Any, wanted: str | None, *, decode_selector: str, mass_recall: bool
) -> str:
    """The digest asked for, or the default: nothing where nothing is needed, the selector's own
    where it has one, otherwise K on the device.

    Raises ValueError with what the selector, the decode selector or the diagnostic accepts.
    """
    accepts = {f"selector={selector.name}": selector.digests}
    if decode_selector == "minmax":
        accepts["decode_selector=minmax"] = DECODE_MINMAX
    if mass_recall:
        accepts["mass_recall=true"] = MASS_RECALL
    if wanted is None:
        usable = set(selector.digests).intersection(*accepts.values())
        for name in ("none", selector.name, "resident_k"):
            if name in usable:
                return name
        wanted = selector.digests[0]
    for who, digests in accepts.items():
        if wanted not in digests:
            raise ValueError(f"digest={wanted}: {who} accepts {' | '.join(digests)}")
    return wanted
