"""Published runs, predicted: ``python -m tests.planner.published [--set NAME] [--rows FILE] [--parts] [--raw]``.

Peak memory is predicted as the row tells it: as bytes asked for, or as those that torch's allocator reserves for them.
With ``--raw`` it is the plan's own.

Each row is a plain GPT or Llama LightningModule of that size under that machine's preset and that layout. Printed are
predicted over measured step time and peak memory, the medians, the worst, and Kendall's tau of layouts of one model on
one machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lightning_par.planner.machine.machines import read_machine
from lightning_par.planner.planner import Planner
from lightning_par.planner.prediction import Prediction
from tests.planner.models import GPT, Llama

ROWS = Path(__file__).with_name("measured.json")
ORDER = "zigzag"
"""Of tokens over the sequence axis, which the rows don't say; see `--contiguous`."""
RESERVED = {"torchtitan-h100": 1.12}
"""By set, bytes that torch's allocator reserves by those it is asked for, where rows tell the former: what `allocator`
makes of what torch's own engine asks for (1.10 to 1.15 for the ranks of `torchs_own`)."""
_RECOMPUTE = {"selective (per-op)": "selective"}


def rows(path: Path = ROWS) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def module_of(row: dict[str, Any]) -> Any:
    """What makes the row's module."""
    m = row["model"]
    sizes = dict(
        layers=m["layers"], hidden=m["hidden"], heads=m["heads"], ffn=m["ffn"], vocab=m["vocab"], seq=m["sequence"]
    )
    if m["gated"]:
        return partial(Llama, kv=m["kv_heads"], **sizes)
    stored = (row["attention"] or "").startswith("unfused")
    return partial(GPT, tied=m["tied"], flash=not stored, dropout=0.1 if stored else 0.0, **sizes)


def layout_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row's layout, as ``--layout`` takes it."""
    at = row["layout"]
    found: dict[str, Any] = {
        "data_parallel_size": at["dp"], "pipeline_parallel_size": at["pp"], "sequence_parallel_size": at["cp"],
        "tensor_parallel_size": at["tp"],
    }  # fmt: skip
    if at["cp"] > 1:
        found |= {"attention": "ring", "token_order": ORDER}
    if at["fsdp"]:
        found["data_parallel"] = "fsdp"
    if at["tp_sequence"]:
        found["shard_residual"] = True
    if at["pp"] > 1:
        found["schedule"] = at["schedule"]
        if at["virtual_stages"] > 1:
            found["stages_per_rank"] = at["virtual_stages"]
        found["microbatches"] = row["global_batch"] // at["dp"] // row["micro_batch"]
    if row["set"] == "zero-bubble":
        found["stages"] = _one_less_at_the_ends(row["model"]["layers"], at["pp"] * at["virtual_stages"])
    return found


def _one_less_at_the_ends(layers: int, stages: int) -> list[str]:
    """The first layers of the stages 1, 2, ..., of which the first and the last have one layer fewer."""
    each = (layers + 2) // stages
    if each == 1:
        return [f"blocks.{i}" for i in range(stages - 2)] + ["norm"]
    return [f"blocks.{each * s - 1}" for s in range(1, stages)]


@lru_cache(maxsize=64)
def _planner(text: str, fused: bool, asynchronous: bool) -> Planner:
    row = json.loads(text)
    size = (row["micro_batch"], row["model"]["sequence"])
    batch = (torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long))
    machine, _ = read_machine(row["gpu"])
    recompute = _RECOMPUTE.get(row["recompute"], row["recompute"])
    # all of them clip
    return Planner(module_of(row), batch, machine, row["precision"], recompute, fused, "norm", asynchronous)


def planner_of(row: dict[str, Any], fused: bool = True, asynchronous: bool = False) -> Planner:
    """Of the row's module, batch and machine; alike rows have the same one.

    Engines of most rows gather tokens before they compute with them, so that is what all are predicted for, and by what
    constants are set.
    """
    keys = ("micro_batch", "model", "gpu", "precision", "recompute", "attention")
    return _planner(json.dumps({k: row[k] for k in keys}, sort_keys=True), fused, asynchronous)


def predicted(row: dict[str, Any], fused: bool = True, asynchronous: bool = False) -> Prediction:
    return planner_of(row, fused, asynchronous).evaluate(layout_of(row), row["gpus"], row["global_batch"])


def measured_time(row: dict[str, Any]) -> float:
    return float(row["measured"].get("step_time_s") or row["derived"]["step_time_s"])


def peak(row: dict[str, Any], one: Prediction) -> float:
    """Bytes of the rank that takes most, in the row's own engine."""
    machine, _ = read_machine(row["gpu"])
    asked = [stage.peak / machine.fragmentation for stage in one.stages]
    if row["set"] in RESERVED and row["layout"]["tp"] > 1:
        # torch's `loss_parallel` holds 4 copies of its part of the logits in single precision, this package's loss 2
        # and one in half (see `test_losses`); its pipelines keep what the last stage makes of all microbatches.
        at, m = row["layout"], row["model"]
        copy = row["micro_batch"] * m["sequence"] / at["cp"] * m["vocab"] / at["tp"] * 4
        asked[-1] += copy * (1.5 + (one.candidate.microbatches - 1) / 2 * (at["pp"] > 1))
    return max(asked) * RESERVED.get(row["set"], 1.0)


def tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau of pairs of numbers."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for i, a in enumerate(pairs) for b in pairs[i + 1 :] if a[1] != b[1]]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / len(signs) if signs else 1.0


def orders(found: list[tuple[dict[str, Any], Prediction]]) -> Iterator[tuple[str, float, int]]:
    """Kendall's tau for each model on one machine."""
    alike: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, one in found:
        m = row["model"]
        per_token = row["global_batch"] * m["sequence"] / row["gpus"]
        key = f"{row['set']} {row['gpu']} L{m['layers']} h{m['hidden']}"
        alike[key].append(
            (one.seconds / per_token * one.candidate.layout.world_size / row["gpus"], measured_time(row) / per_token)
        )
    for key, pairs in alike.items():
        if len(pairs) > 1:
            yield key, tau(pairs), len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--set", default="")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--raw", action="store_true", help="peaks as a plan's table has them, of this package's engine")
    parser.add_argument("--contiguous", action="store_true", help="tokens of a sequence axis follow one another")
    asked = parser.parse_args()
    global ORDER
    ORDER = "contiguous" if asked.contiguous else ORDER
    found, times, peaks = [], [], []
    for number, row in enumerate(rows(asked.rows)):
        if asked.set not in row["set"]:
            continue
        begin = time.time()
        one = predicted(row, not asked.eager)
        found.append((row, one))
        ratio = one.seconds / measured_time(row)
        if row["tier_time"] != "C":
            times.append(ratio)
        text = f"{number:2} {row['set'][:15]:15} {row['gpu'][:9]:9} {row['gpus']:4} h{row['model']['hidden']:<6}"
        text += f"{one.seconds:8.3f} / {measured_time(row):8.3f} = {ratio:5.3f} {row['tier_time']}"
        held = row["measured"].get("peak_memory_gb")
        if held:
            said = (one.peak if asked.raw else peak(row, one)) / 1e9
            peaks.append(said / held)
            text += f"  {said:6.1f} / {held:6.1f} GB = {peaks[-1]:5.3f} {row['tier_memory']}"
        else:
            text += f"  {one.peak / 1e9:6.1f} GB"
        print(f"{text} mfu {one.mfu:.3f} ({time.time() - begin:.1f} s)", flush=True)
        if asked.parts:
            print("     ", ", ".join(f"{k} {v:.3f}" for k, v in one.parts.items() if v), f"bubble {one.bubble:.3f}")
            print("     ", one.stages[0])
    for name, ratios in (("step time (tiers A, B)", times), ("peak memory", peaks)):
        if ratios:
            off = sorted(abs(r - 1) for r in ratios)
            print(f"{name}: median {median(off):.1%}, worst {off[-1]:.1%}, mean ratio {sum(ratios) / len(ratios):.3f}")
    for key, value, count in orders(found):
        print(f"tau {value:+.2f} of {count}: {key}")


if __name__ == "__main__":
    main()
