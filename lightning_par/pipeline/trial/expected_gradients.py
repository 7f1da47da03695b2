"""Which parameters get a gradient: found by a run that knows nothing of stages, and compared with what stages yield.

What a pipeline knows of a step comes from runs in which metrics, reads and parts of the model are stood in for. This
run stands in for none: fake parameters, the real batch, torch's own backward. Metrics that look at values, as most do
that check what they are given, tell nothing instead, if nothing is made of what they tell. Where the step can't be run
so, as where the code goes by values of the model, the first step is run on one rank that gets all weights, if they are
small beside the memory that is free. Where they are not, or random numbers decide, nothing is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.broadcast import kind_of, send_to_all
from lightning_par.pipeline.effects.console import hushed
from lightning_par.pipeline.effects.logged_outputs import silent
from lightning_par.pipeline.effects.random_draws import stand_at, standing
from lightning_par.pipeline.trial.analysis_copy import Fakes
from lightning_par.pipeline.trial.constant_draws import EXTREMES, Constants
from lightning_par.pipeline.trial.untraced import untraced
from lightning_par.private.fake_tensors import FakeTensorMode
from lightning_par.private.graph import Accumulation, function_of
from lightning_par.python_state import generators
from lightning_par.python_state.nested_tensors import cloned, map_tensors
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.user_classes import put_on, users_class
from lightning_par.strategies.host_memory import free_on
from lightning_par.trial.module_copy import stand_in
from lightning_par.trial.step import Step, loss_in
from lightning_par.trial.step_flops import nodes_behind
from lightning_par.trial.trial_run import quiet

_SHARE = 0.25  # of free memory that one rank may take for a run of the whole model


def expected_gradients(step: Step) -> frozenset[str] | None:
    """The first names of the parameters that get a gradient from ``step`` on one device; None if that can't be told.

    Example::

        step = Step(module, "training_step", batch, (0,), nullcontext, True, torch.device("cpu"))
        assert expected_gradients(step) == {"head.weight", "head.bias"}
    """
    streams = RunState.current.streams
    try:
        with generators.kept() as has_drawn, streams.kept(), quiet(), hushed(), torch.enable_grad(), step.context():
            stood = standing()
            found = _gradients_told(step)
            if found is not None and has_drawn():
                if streams.whole:  # fakes move no generator on: what is drawn behind them is another number
                    return None
                for level in EXTREMES:  # with other draws: where these decide, nothing is expected
                    stand_at(stood)
                    torch.manual_seed(torch.initial_seed() + 1)  # of whole numbers, which are drawn as ever
                    with Constants(level):
                        if _gradients_told(step) != found:
                            return None
        return found
    except Exception:  # user code on values that are not there, or torch's own limits
        return None


def _gradients_told(step: Step) -> frozenset[str] | None:
    before = generators.global_state()
    try:
        return _gradients(step, metrics=True)
    except Exception:
        generators.set_global_state(before)
        return _gradients(step, metrics=False)


@untraced
def _gradients(step: Step, metrics: bool) -> frozenset[str] | None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copy = _plain_copy(step, Fakes(mode, step), mode.from_tensor)
    for module in copy.modules() if not metrics else ():
        if isinstance(module, Metric):
            vars(module).update(forward=_tell_nothing, update=_do_nothing, compute=_tell_nothing)
    return _gradients_of(copy, step)


class _Untold:
    """What a metric would have told: it may be handed on, as to ``self.log``, but nothing can be made of it."""

    def _refuse(self, *args: Any) -> Any:
        raise TypeError("a metric's value is not known")

    __bool__ = __eq__ = __lt__ = __gt__ = __len__ = __iter__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _tell_nothing(*args: Any, **kwargs: Any) -> _Untold:
    return _Untold()


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a metric's update."""


def _gradients_of(copy: Any, step: Step) -> frozenset[str] | None:
    RunState.current.streams.begin_step(0, 0)
    loss = loss_in(getattr(copy, step.name)(map_tensors(cloned, step.batch), *step.rest))
    if loss is None or not loss.requires_grad:
        return None
    leaves = _reached_by_torchs_own(loss)
    if leaves is None:
        with silent(step.module):  # which hooks may hold, in place of the copy
            loss.backward()
        return frozenset(name for name, p in copy.named_parameters() if p.grad is not None)
    return frozenset(name for name, p in copy.named_parameters() if id(p) in leaves)


def _reached_by_torchs_own(loss: Tensor) -> frozenset[int] | None:
    """The ids of the leaves that the backward of ``loss`` adds a gradient to; None where what is on the way may give
    none: a `torch.autograd.Function`, as a module's backward hook is, and functions of lists, of whose results some may
    not be used. Torch's other nodes give one to all behind them."""
    nodes = nodes_behind(loss) or ()
    if any(function_of(type(node)) is not None or node.name().startswith("Foreach") for node in nodes):
        return None
    return frozenset(id(node.variable) for node in nodes if type(node) is Accumulation)


def _plain_copy(step: Step, tensor: Callable[[Tensor], Tensor], state: Callable[[Tensor], Tensor]) -> Any:
    """A copy of the module whose metrics compute, on states that can take what its tensors are."""
    copy = stand_in(step.module, tensor, step.shared, lambda *args, **kwargs: None)
    for module in copy.modules():
        if isinstance(module, Metric):
            for name in ("forward", "update", "compute"):
                vars(module).pop(name, None)
            for name, value in vars(module).items():
                if type(value) is Tensor:
                    vars(module)[name] = state(value)
    return copy


def real_gradients(
    step: Step, axis: Axis, holds: Callable[[str], tuple[int, ...]], around: Callable[[], AbstractContextManager[None]]
) -> frozenset[str] | None:
    """As `expected_gradients`, by a run on real weights, which the last rank alone has. All ranks must call it.

    Args:
        step: a few samples, or a batch of a small model.
        axis: the pipeline axis.
        holds: the ranks that hold a tensor, by name.
        around: entered around the run.

    Returns:
        The same on all ranks; None where the weights and what their backward keeps are not small beside free memory,
        or are sharded.
    """
    tensors = dict((*step.module.named_parameters(), *step.module.named_buffers()))
    plain = all(x.origin.sharding is None if isinstance(x, Elsewhere) else _is_plain(x) for x in tensors.values())
    needed = 2 * sum(x.numel() * x.dtype.itemsize for x in tensors.values())  # with gradients
    room = min(axis.all_gather_object(_SHARE * free_on(step.device) - needed if plain else 0.0, "expected"))
    if room <= 0:
        return None
    here = axis.rank == axis.size - 1
    whole: dict[int, Tensor] = {}
    for name, x in tensors.items():
        own = x
        if len(holds(name)) < axis.size:
            own = send_to_all(x, kind_of(x), holds(name)[0], axis, "expected")
        if here:
            whole[id(x)] = _own(own.to(step.device), x)
    found = _run_plainly(step, whole, room, around) if here else None
    return axis.all_gather_object(found, "expected")[-1]


def _is_plain(x: Tensor) -> bool:
    known = type(x) in (Tensor, nn.Parameter, users_class(x))
    return known and not x.is_meta and x.layout is torch.strided


def _own(x: Tensor, like: Tensor) -> Tensor:
    mine = x.detach().clone().requires_grad_(like.requires_grad)
    own = nn.Parameter(mine, like.requires_grad) if isinstance(like, nn.Parameter) else mine
    return put_on(own, users_class(like))


def _run_plainly(
    step: Step, whole: dict[int, Tensor], room: float, around: Callable[[], AbstractContextManager[None]]
) -> frozenset[str] | None:
    kept = 0.0

    def keep(x: Tensor) -> Tensor:
        nonlocal kept
        kept += x.numel() * x.element_size()
        if kept > room:
            raise MemoryError  # caught below: then nothing is expected
        return x

    @untraced
    def run(step: Step) -> frozenset[str] | None:
        copy = _plain_copy(step, lambda x: whole[id(x)] if id(x) in whole else x.detach().clone(), cloned)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            return _gradients_of(copy, step)

    streams = RunState.current.streams
    try:
        with generators.kept(), streams.kept(), quiet(), hushed(), torch.enable_grad(), step.context(), around():
            return run(step)
    except Exception:  # whatever this rank lacks, it must not end a run that might go well
        return None


def refuse_others(expected: frozenset[str] | None, found: Collection[str], held: Collection[str], rank: int) -> None:
    """Raises RuntimeError where ``found``, the parameters of those ``held`` with a gradient, are not those expected."""
    if expected is None:
        return
    for name in held:
        if (name in expected) != (name in found):
            raise RuntimeError(other_gradient(name, name in expected, f" on pipeline rank {rank}"))


def other_gradient(name: str, expected: bool, where: str = "") -> str:
    """What to say of a parameter that has a gradient where none is ``expected``, or none where one is."""
    has, should = ("no gradient", "it gets one") if expected else ("a gradient", "it gets none")
    return (
        f"{name!r} got {has}{where}, but on one device {should}. The step does something that a pipeline does not see, "
        "and would train another model. Use TensorParallelStrategy, or verify=False to train all the same."
    )
