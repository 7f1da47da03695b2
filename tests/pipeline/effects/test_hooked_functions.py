"""Full backward hooks of modules without parameters, which no stage has as a unit: one device's, on all ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.helpers.pool import Pool
from tests.helpers.stages import trainer
from tests.helpers.surface import Net, check, loader, weights


class Hooked(Net):
    """A hook on an activation halves its gradient, and one before it keeps what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.net[1].register_full_backward_hook(lambda m, into, out: (into[0] * 0.5,))
        self.net[1].register_full_backward_pre_hook(self.see)

    def see(self, module: Any, out: tuple[Tensor, ...]) -> None:
        self.seen.append(float(out[0].square().sum()))


def _fit() -> dict[str, Any]:
    module = Hooked()
    trainer(microbatches="auto", max_epochs=1).fit(module, loader(12))
    return {"seen": module.seen, "weights": weights(module)}


def test_hooks_on_an_activation_run_on_its_stage_and_are_one_devices(pool: Pool) -> None:
    assert len(check(pool, _fit)[0]["seen"]) == 3
