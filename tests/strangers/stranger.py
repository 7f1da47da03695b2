"""A model of a public package: how it is trained by the package's own public API, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import nn

STRATEGIES = ("tensor_parallel", "pipeline_parallel", "sequence_parallel", "layer_placement", "fsdp")
STEPS = 3  # of the optimizer

Arguments = dict[str, Any]
"""Of the Trainer."""


@dataclass(frozen=True)
class Stranger:
    """What a package's user writes, and what is expected of it.

    Args:
        fit: trains with the given arguments of the Trainer, whichever of them the package takes.
        pytorch: the namespace of the package's Lightning.
        precision: of the Trainer; float32 where the package writes float32 itself.
        tolerance: relative; of float64, or of a few roundings of float32.
        transformer: whether under tensor each rank holds at most 60 percent of the parameters.
        sequence: whether its batches have a sequence.
        own_loop: whether the package makes the Trainer and the loader, so that all replicas see the same batches.
        own_parts: whether the package shares its data out to replicas itself, which one device can't do.
        refused: what the refusal says, by strategy: a regular expression.
        microbatches: that "auto" takes.
    """

    fit: Callable[[Arguments], None]
    pytorch: str = "lightning.pytorch"
    precision: str = "64-true"
    tolerance: float = 1e-9
    transformer: bool = False
    sequence: bool = False
    own_loop: bool = False
    own_parts: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    microbatches: int | None = None

    def strategies(self) -> tuple[str, ...]:
        """Those that fit."""
        fits = {"sequence_parallel": self.sequence, "fsdp": not self.own_parts}
        return tuple(name for name in STRATEGIES if fits.get(name, True))


class _Turns:
    """A loader of batches that are there; Lightning takes a plain list for several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def with_trainer(
    module: Callable[[], Any], loader: Callable[[], Any], pytorch: str = "lightning.pytorch", **more: Any
) -> Stranger:
    """A module and a loader that go into a Trainer of Lightning's.

    Args:
        module: makes the LightningModule.
        loader: makes the package's own loader.
        pytorch: the namespace of Lightning.
        more: of the `Stranger`.
    """

    def fit(arguments: Arguments) -> None:
        replicas, replica = arguments.pop("replicas")
        own = module()
        for one in own.modules():
            if isinstance(one, nn.Dropout):  # which no argument turns off; masks are no one device's
                one.p = 0.0
        batches = loader()
        assert len(batches) >= 2 * STEPS, "a replica has too few batches of its own"
        if replicas > 1:  # its own batches, in turn
            batches = _Turns(list(batches)[replica::replicas])
        import_module(pytorch).Trainer(**arguments).fit(own, batches)

    return Stranger(fit, pytorch=pytorch, **more)
