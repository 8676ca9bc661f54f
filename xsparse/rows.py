"""From samples to result rows: one row per (task, length) and a macro row per length.

A row puts accuracy, measured density and measured speed of the same prompts side by side, beside
dense attention on those prompts. Columns and sample fields are described in docs/results.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Any

from xsparse import stats

Sample = Mapping[str, Any]

MACRO_TASK = "mean"

_IDENTITY = """
run_id dense_run_id model weights_sha256 dtype tokenizer_hash prompt_hash task length n tasks seed
selector threshold stride block_size block_size_ratio chunk_size reduce_heads reduce_queries
reduce_sub_blocks attend engine transfer ring_slots digest digest_format decode_selector
decode_budget_tokens decode_cache_gb cuda_graph ops_backend dense_kernel device host
versions git_commit command
"""
_ACCURACY = """
accuracy accuracy_low accuracy_high dense_accuracy delta delta_low delta_high p_value mass_recall
"""
_COST = """
mask_density page_density transfer_ratio executed_density decode_density bytes_h2d bytes_d2h
decode_bytes_h2d digest_bytes prefill_tok_s decode_tok_s ttft_s tpot_s dense_prefill_tok_s
prefill_speedup prefill_speedup_low prefill_speedup_high decode_speedup decode_speedup_low
decode_speedup_high estimate_s select_s transfer_s attend_s sync_s rest_s peak_gpu_gb peak_host_gb
cpu_share warmup_tokens repeats
"""
COLUMNS = (*_IDENTITY.split(), *_ACCURACY.split(), *_COST.split())

# Given by the caller; the rest of a row is computed here.
_COMPUTED_IDENTITY = ("prompt_hash", "task", "length", "n", "tasks")
CONFIG_COLUMNS = (
    *(column for column in _IDENTITY.split() if column not in _COMPUTED_IDENTITY),
    "warmup_tokens",
    "repeats",
)

STAGES = ("estimate", "select", "transfer", "attend", "sync")

# row column -> (numerator, denominator) among the counters of a sample
DENSITIES = {
    "mask_density": ("mask_kept", "mask_causal"),
    "page_density": ("pages_moved", "pages_history"),
    "transfer_ratio": ("bytes_h2d", "bytes_history"),
    "executed_density": ("executed", "mask_causal"),
    "decode_density": ("decode_tiles_kept", "decode_tiles"),
    "mass_recall": ("mass_kept", "mass_total"),
}


def build_rows(
    config_identity: Mapping[str, Any],
    samples: Sequence[Sample],
    dense_samples: Sequence[Sample] | None,
    *,
    dense_comparable: bool = True,
    dense_run_ids: Mapping[tuple[str, int], str] | None = None,
) -> list[dict[str, Any]]:
    """Rows of one run, lengths ascending, each length's macro row after its tasks.

    config_identity: values of `CONFIG_COLUMNS`; what it lacks is null.
    dense_samples: dense attention on the same prompts (more of them is fine); None for a run that
        has no baseline, such as the baseline itself.
    dense_comparable: whether times may be compared: same host, device, engine and chunking.
    dense_run_ids: the baseline run of each (task, length) where they are several.

    Raises ValueError for unknown identity columns, for a prompt stored twice, and where a prompt
    has no dense twin with the same hash.
    """
    unknown = sorted(set(config_identity) - set(CONFIG_COLUMNS))
    if unknown:
        raise ValueError(f"unknown identity columns {unknown}, allowed are {CONFIG_COLUMNS}")
    if not samples:
        raise ValueError("build_rows needs at least one sample, got none")

    cells = _cells(samples)
    twins = None if dense_samples is None else _twins(cells, _cells(dense_samples))
    resident = config_identity.get("engine") == "resident"

    baseline = {key: config_identity.get("dense_run_id") for key in cells}
    baseline.update(dense_run_ids or {})

    def row(task: str, length: int, keys: list[tuple[str, int]]) -> dict[str, Any]:
        own = [cells[key] for key in keys]
        dense = None if twins is None else [twins[key] for key in keys]
        run_ids = {baseline[key] for key in keys}
        values: dict[str, Any] = {
            **config_identity,
            "dense_run_id": run_ids.pop() if len(run_ids) == 1 else None,
            "task": task,
            "length": length,
            "tasks": len(keys),
            **_prompts(own),
            **_accuracy(own, dense),
            **_cost(sum(own, []), resident),
            **_speed(own, dense if dense_comparable else None),
        }
        return {column: values.get(column) for column in COLUMNS}

    rows = []
    by_length = sorted(cells, key=lambda key: key[1])
    for length, group in groupby(by_length, key=lambda key: key[1]):
        keys = list(group)
        rows += [row(key[0], length, [key]) for key in keys]
        rows.append(row(MACRO_TASK, length, keys))
    return rows


def ratio_of_sums(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Sum of numerators over sum of denominators; None for an empty or a missing denominator."""
    numerators, denominators = zip(*pairs, strict=True)
    if None in numerators or None in denominators:
        return None
    total = sum(denominators)
    return sum(numerators) / total if total else None


def tpot_s(sample: Sample) -> float | None:
    """Seconds per decoded token; the first new token comes from the prefill."""
    steps, seconds = decode_steps(sample), sample.get("decode_s") or 0.0
    return seconds / steps if steps > 0 and seconds > 0 else None


def decode_steps(sample: Sample) -> int:
    """Steps in `decode_s`: a graph's bursts may run past the end of the answer."""
    return sample.get("decode_steps", (sample.get("new_tokens") or 0) - 1)


def _cells(samples: Sequence[Sample]) -> dict[tuple[str, int], list[Sample]]:
    """Samples by (task, length), each cell sorted by index."""
    found: dict[tuple[str, int], dict[int, Sample]] = {}
    for sample in samples:
        cell = found.setdefault((sample["task"], sample["length"]), {})
        if sample["index"] in cell:
            raise ValueError(
                f"prompt {sample['index']} of {sample['task']} at {sample['length']} tokens "
                "is stored twice"
            )
        cell[sample["index"]] = sample
    return {key: [cell[index] for index in sorted(cell)] for key, cell in found.items()}


def _twins(
    cells: dict[tuple[str, int], list[Sample]], dense: dict[tuple[str, int], list[Sample]]
) -> dict[tuple[str, int], list[Sample]]:
    """The dense sample of each sparse one, in the same order, prompts byte-identical."""
    twins = {}
    for (task, length), own in cells.items():
        by_index = {sample["index"]: sample for sample in dense.get((task, length), [])}
        for sample in own:
            where = f"prompt {sample['index']} of {task} at {length} tokens"
            twin = by_index.get(sample["index"])
            if twin is None:
                raise ValueError(f"{where} has no dense sample")
            if twin["prompt_hash"] != sample["prompt_hash"]:
                raise ValueError(
                    f"{where} differs between sparse ({sample['prompt_hash']}) "
                    f"and dense ({twin['prompt_hash']})"
                )
        twins[task, length] = [by_index[sample["index"]] for sample in own]
    return twins


def _prompts(cells: list[list[Sample]]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for sample in (sample for cell in cells for sample in cell):
        digest.update(f"{sample['task']} {sample['index']} {sample['prompt_hash']}\n".encode())
    return {"n": sum(map(len, cells)), "prompt_hash": digest.hexdigest()[:16]}


def _accuracy(cells: list[list[Sample]], dense: list[list[Sample]] | None) -> dict[str, Any]:
    scores = [[float(sample["score"]) for sample in cell] for cell in cells]
    mean, low, high = stats.macro_ci(scores)
    values: dict[str, Any] = {"accuracy": mean, "accuracy_low": low, "accuracy_high": high}
    if dense is not None:
        dense_scores = [[float(sample["score"]) for sample in cell] for cell in dense]
        values["dense_accuracy"] = fmean(map(fmean, dense_scores))
        delta = stats.macro_delta(list(zip(scores, dense_scores, strict=True)))
        values.update(zip(("delta", "delta_low", "delta_high", "p_value"), delta, strict=True))
    return values


def _cost(samples: list[Sample], resident: bool) -> dict[str, Any]:
    """Densities as ratios of sums; bytes and stage seconds as means per prompt; peaks."""
    counters = [sample["counters"] for sample in samples]
    values: dict[str, Any] = {
        column: ratio_of_sums((c.get(numerator), c.get(denominator)) for c in counters)
        for column, (numerator, denominator) in DENSITIES.items()
    }
    if resident:  # nothing is offloaded, so there is no traffic to relate to
        values["transfer_ratio"] = None
    for column in ("bytes_h2d", "bytes_d2h", "decode_bytes_h2d"):
        values[column] = _reduce(fmean, [c.get(column) for c in counters])
    for column in ("digest_bytes", "peak_gpu_gb", "peak_host_gb"):
        values[column] = _reduce(max, [sample.get(column) for sample in samples])

    values["cpu_share"] = _reduce(fmean, [sample.get("cpu_share") for sample in samples])

    stages = [sample.get("stages_s") or {} for sample in samples]
    measured = [stage for stage in STAGES if any(stage in s for s in stages)]
    for stage in measured:
        values[f"{stage}_s"] = fmean(s.get(stage) or 0.0 for s in stages)
    if measured:
        wall_s = fmean(sample["prefill_s"] for sample in samples)
        values["rest_s"] = max(0.0, wall_s - sum(values[f"{stage}_s"] for stage in measured))
    return values


def _speed(cells: list[list[Sample]], dense: list[list[Sample]] | None) -> dict[str, Any]:
    samples: list[Sample] = sum(cells, [])
    decoding = [sample for sample in samples if tpot_s(sample) is not None]
    values: dict[str, Any] = {
        "prefill_tok_s": _prefill_tok_s(samples),
        "decode_tok_s": ratio_of_sums((decode_steps(s), s["decode_s"]) for s in decoding)
        if decoding
        else None,
        "ttft_s": _reduce(median, [sample.get("ttft_s") for sample in samples]),
        "tpot_s": _reduce(median, [tpot_s(sample) for sample in samples]),
    }
    if dense is None:
        return values
    twins: list[Sample] = sum(dense, [])
    values["dense_prefill_tok_s"] = _prefill_tok_s(twins)
    times = {
        "prefill": [(d["prefill_s"], s["prefill_s"]) for d, s in zip(twins, samples, strict=True)],
        "decode": [(tpot_s(d), tpot_s(s)) for d, s in zip(twins, samples, strict=True)],
    }
    for phase, pairs in times.items():
        timed = [pair for pair in pairs if all(pair)]  # a pair with a missing or zero time is out
        if timed:
            ratio, low, high = stats.speedup(*map(list, zip(*timed, strict=True)))
            values[f"{phase}_speedup"] = ratio
            values[f"{phase}_speedup_low"], values[f"{phase}_speedup_high"] = low, high
    return values


def _prefill_tok_s(samples: list[Sample]) -> float | None:
    return ratio_of_sums((sample["prompt_tokens"], sample["prefill_s"]) for sample in samples)


def _reduce(function: Any, values: Iterable[float | None]) -> float | None:
    """`function` of the values that are there; None if none is."""
    present = [value for value in values if value is not None]
    return function(present) if present else None
