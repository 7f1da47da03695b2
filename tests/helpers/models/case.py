"""What a row of the equality test is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule


@dataclass(frozen=True)
class Case:
    """One row.

    Args:
        module: builds the LightningModule.
        data: seed -> a map-style dataset of `SAMPLES` samples.
        batch_size: samples a batch.
        couples: samples of a batch mix, or numbers are drawn in a step: a data axis then has no one-device reference.
        manual: the module optimizes by hand, so the Trainer can neither clip nor accumulate.
        casts: the module computes in float32 whatever the precision.
    """

    module: Callable[[], LightningModule]
    data: Callable[[int], list[Any]]
    batch_size: int = 4
    couples: bool = False
    manual: bool = False
    casts: bool = False
