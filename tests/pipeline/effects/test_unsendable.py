"""What is said of what can't be sent to the other ranks of a pipeline."""

from __future__ import annotations

import torch

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.absent.origin import Origin
from lightning_par.mesh.axis import Axis
from lightning_par.pipeline.effects.unsendable import unsendable


def test_a_tensor_of_another_stage_is_told_as_what_it_is() -> None:
    origin = Origin("net.calls", (1,), Axis("pipeline", (0, 1), 0, None))
    away = Elsewhere((2,), torch.float64, torch.device("cpu"), origin)
    assert "returns is 'net.calls', which another stage" in unsendable("What the step returns", {"x": away}, "no")
    assert "to the other ranks of the pipeline: it is a lock." in unsendable("self.lock", 1, "it is a lock")
