"""Which parameters get a gradient: found by a run that knows nothing of stages, and compared with what stages yield.

What a pipeline knows of a step comes from runs in which metrics, reads and parts of the model are stood in for. This
run stands in for none: fake parameters, the real batch, torch's own backward. Where it can't be run so, or goes by
random numbers, nothing is expected.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchmetrics import Metric

from lightning_par import generators
from lightning_par.copying import stand_in
from lightning_par.pipeline.copies import Fakes, cloned
from lightning_par.pipeline.draws import stand_at, standing
from lightning_par.pipeline.speech import hushed
from lightning_par.pipeline.step import Step, loss_in
from lightning_par.pipeline.structure import map_tensors
from lightning_par.pipeline.watch import untraced
from lightning_par.random import streams
from lightning_par.record import quiet


def expected_gradients(step: Step) -> frozenset[str] | None:
    """The first names of the parameters that get a gradient from ``step`` on one device; None if that can't be told.

    Example::

        step = Step(module, "training_step", batch, (0,), nullcontext, True, torch.device("cpu"))
        assert expected_gradients(step) == {"head.weight", "head.bias"}
    """
    before = vars(streams).copy()
    try:
        with generators.kept() as has_drawn, quiet(), hushed(), torch.enable_grad(), step.context():
            stood = standing()
            found = _gradients(step)
            if found is not None and has_drawn():
                stand_at(stood)
                torch.manual_seed(torch.initial_seed() + 1)
                if _gradients(step) != found:
                    return None
        return found
    except Exception:  # user code on values that are not there, or torch's own limits
        return None
    finally:
        vars(streams).update(before)


@untraced
def _gradients(step: Step) -> frozenset[str] | None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copy = _plain_copy(step, Fakes(mode, step), mode)
    streams.begin_step(0, 0)
    loss = loss_in(getattr(copy, step.name)(map_tensors(cloned, step.batch), *step.rest))
    if loss is None or not loss.requires_grad:
        return None
    loss.backward()
    return frozenset(name for name, p in copy.named_parameters() if p.grad is not None)


def _plain_copy(step: Step, fakes: Fakes, mode: FakeTensorMode) -> Any:
    """A copy of the module whose metrics compute, on states that can take fakes."""
    copy = stand_in(step.module, fakes, step.shared, lambda *args, **kwargs: None)
    for module in copy.modules():
        if isinstance(module, Metric):
            for name in ("forward", "update", "compute"):
                vars(module).pop(name, None)
            for name, value in vars(module).items():
                if type(value) is Tensor:
                    vars(module)[name] = mode.from_tensor(value)
    return copy


def refuse_others(expected: frozenset[str] | None, found: Collection[str], held: Collection[str], rank: int) -> None:
    """Raises RuntimeError where ``found``, the parameters of those ``held`` with a gradient, are not those expected."""
    if expected is None:
        return
    for name in held:
        if (name in expected) != (name in found):
            has, should = ("no gradient", "it gets one") if name in expected else ("a gradient", "it gets none")
            raise RuntimeError(
                f"{name!r} got {has} on pipeline rank {rank}, but on one device {should}. The step does something that "
                "a pipeline does not see, and would train another model. Use TensorParallelStrategy, or verify=False "
                "to train all the same."
            )
