"""A module recorded once, priced under any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_par.planner.build import build_module
from lightning_par.planner.layouts import Candidate, read_candidate
from lightning_par.planner.local_work import Recompute
from lightning_par.planner.machines import Machine
from lightning_par.planner.optimizer_state import optimizer_state
from lightning_par.planner.precisions import read_precision
from lightning_par.planner.predict import Prediction, Run, predict
from lightning_par.planner.profile import Profile, make_profile
from lightning_par.planner.recorded import record
from lightning_par.planner.stages import Stages, make_stages
from lightning_par.private.pytree import tree_leaves, tree_map


class Planner:
    """A module's step, recorded once without memory, and what layouts of it cost.

    Args:
        module: a LightningModule, its class, or a function that makes one.
        batch: one batch, as one replica's training step gets it.
        machine: that it is to run on.
        precision: as `read_precision` takes it.
        recompute: what backward computes again.
        fused: whether functions that walk over memory are fused, as by torch.compile.

    Raises:
        ValueError: the module can't be built, or its step can't be run without values.
    """

    def __init__(
        self,
        module: Any,
        batch: Any,
        machine: Machine,
        precision: str | int = "32-true",
        recompute: Recompute = "none",
        fused: bool = True,
    ) -> None:
        self.machine, self.precision = machine, read_precision(precision)
        built: nn.Module = build_module(module)
        self.optimizer = optimizer_state(built)
        built = built.to(self.precision.dtype)
        batch = tree_map(self._cast, batch)
        self.step = record(built, batch)
        tokens = _tokens(batch) / self.step.samples
        self.recompute, self.fused, self.tokens = recompute, fused, tokens
        self._profiles: dict[int, Profile] = {}
        self._stages: dict[Any, Stages] = {}

    def profile(self, ranks: int) -> Profile:
        """Over ``ranks`` ranks of the tensor axis."""
        if ranks not in self._profiles:
            self._profiles[ranks] = make_profile(self.step, ranks)
        return self._profiles[ranks]

    def evaluate(self, layout: Mapping[str, Any], devices: int, samples: int | None = None) -> Prediction:
        """What a layout costs, given as `HybridParallelStrategy`'s arguments.

        Raises:
            ValueError: the layout can't be; the message says why.
        """
        asked = {key: value for key, value in layout.items() if key != "stages"}
        one = read_candidate(asked, devices, self.step.samples, samples)
        return self.price(one, devices, layout.get("stages"))

    def price(self, one: Candidate, devices: int, stages: Any = None) -> Prediction:
        """What ``one`` costs.

        Raises:
            ValueError: it can't be; the message says why.
        """
        profile = self.profile(one.layout.tensor)
        key = one.stages, str(stages)
        if key not in self._stages:
            self._stages[key] = make_stages(profile, one.stages, stages)
        run = Run(
            self.machine, devices, self.precision, self.optimizer, self.recompute, self.fused, self.tokens
        )  # fmt: skip
        return predict(profile, one, run, self._stages[key])

    def _cast(self, x: Any) -> Any:
        return x.to(self.precision.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _tokens(batch: Any) -> float:
    """Entries of the batch's largest tensor of whole numbers, else its samples."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    counts = [x.numel() for x in tensors if not x.is_floating_point() and x.ndim > 1]
    return float(max(counts, default=0) or max((x.shape[0] for x in tensors if x.ndim), default=1))
