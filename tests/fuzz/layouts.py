"""The layouts that programs are trained under, by name."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FuzzLayout:
    """A strategy, made anew for each run.

    Args:
        family: what it is counted as.
        ranks: processes.
        make: called on each rank.
        weight: how often it is drawn, against others of its family.
        shapes: what ``h`` has to be, for layouts that cut tokens.
    """

    family: str
    ranks: int
    make: Callable[[], Any]
    weight: float = 1.0
    shapes: tuple[str, ...] = ("BTC", "BC")


def _strategy(kind: str, **arguments: Any) -> Callable[[], Any]:
    def make() -> Any:
        import lightning_par

        return getattr(lightning_par, kind)(**arguments)

    return make


def _scattered(name: str, module: Any) -> int | None:
    return zlib.crc32(name.encode()) % 2 if name and "." not in name else None


_HYBRID, _PIPELINE, _PLACED = "HybridParallelStrategy", "PipelineParallelStrategy", "LayerPlacementStrategy"

LAYOUTS: dict[str, FuzzLayout] = {
    "tensor": FuzzLayout("tensor", 2, _strategy("TensorParallelStrategy"), 2),
    "shard-residual": FuzzLayout("tensor", 2, _strategy("TensorParallelStrategy", shard_residual=True)),
    **{
        f"sequence-{kind}": FuzzLayout(
            "sequence", 2, _strategy("SequenceParallelStrategy", attention=kind), shapes=("BTC",)
        )
        for kind in ("auto", "ring", "ulysses", "all_gather")
    },
    **{
        f"pipeline-{count}": FuzzLayout("pipeline", 2, _strategy(_PIPELINE, microbatches=count), weight)
        for count, weight in (("auto", 6), (1, 2), (2, 2), (4, 2))
    },
    **{
        f"{schedule}-{count}": FuzzLayout(
            "pipeline", 2, _strategy(_PIPELINE, schedule=schedule, microbatches=count), 0.7
        )
        for schedule in ("gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
        for count in ("auto", 2)
    },
    "placement": FuzzLayout("placement", 2, _strategy(_PLACED, placement="balanced"), 2),
    "placement-scattered": FuzzLayout("placement", 2, _strategy(_PLACED, placement=_scattered)),
    "placement-2": FuzzLayout("placement", 2, _strategy(_PLACED, placement="balanced", microbatches=2)),
    "data": FuzzLayout("data", 2, _strategy(_HYBRID, data_parallel_size=2)),
    "fsdp": FuzzLayout("data", 2, _strategy(_HYBRID, data_parallel="fsdp"), 2),
    "fsdp-sequence": FuzzLayout(
        "data", 2, _strategy(_HYBRID, data_parallel="fsdp", sequence_parallel_size=2), shapes=("BTC",)
    ),
    "pipeline-tensor": FuzzLayout(
        "product", 4, _strategy(_HYBRID, pipeline_parallel_size=2, tensor_parallel_size=2), 2
    ),
    "pipeline-sequence": FuzzLayout(
        "product", 4, _strategy(_HYBRID, pipeline_parallel_size=2, sequence_parallel_size=2), shapes=("BTC",)
    ),
    "sequence-tensor": FuzzLayout(
        "product", 4, _strategy(_HYBRID, sequence_parallel_size=2, tensor_parallel_size=2), shapes=("BTC",)
    ),
    "fsdp-tensor": FuzzLayout("product", 4, _strategy(_HYBRID, data_parallel="fsdp", tensor_parallel_size=2)),
    "fsdp-pipeline": FuzzLayout("product", 4, _strategy(_HYBRID, data_parallel="fsdp", pipeline_parallel_size=2)),
}
FAMILIES = tuple(dict.fromkeys(one.family for one in LAYOUTS.values()))


def names_of(asked: list[str]) -> list[str]:
    """The layouts of names and families.

    Raises:
        ValueError: there is none of that name.
    """
    found: list[str] = []
    for name in asked:
        own = [layout for layout, one in LAYOUTS.items() if name in (layout, one.family, "all")]
        if not own:
            raise ValueError(f"{name!r} is no layout, but {', '.join(LAYOUTS)}, and no family, but {FAMILIES}.")
        found += own
    return list(dict.fromkeys(found))
