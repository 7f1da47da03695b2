"""Before the first optimizer step: is a batch cut into microbatches what the whole batch is, on the user's own data?

What is believed of a step rests on rules, and rules on how torch's functions and users' code behave. So a few samples
of the first batch run whole, once more, and cut, with all effects undone and all random draws replaced by constants.
Two runs of the whole that differ show state that moves unseen with every run; what differs when cut mixes samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.pipeline.trial.constant_draws import EXTREMES, Constants
from lightning_par.pipeline.trial.expected_gradients import expected_gradients, other_gradient, real_gradients
from lightning_par.private.compiler import uncompiled
from lightning_par.python_state import generators
from lightning_par.python_state.nested_tensors import cloned, map_tensors
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.tensor_classes import of_its_class, plain
from lightning_par.python_state.tensor_writes import overwrite
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import leaf
from lightning_par.trial.step import Step

if TYPE_CHECKING:
    from lightning_par.pipeline.effects.watched_run import Watch
    from lightning_par.pipeline.run.engine import Engine

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_COARSE = 0.1  # of dtypes with fewer bits
_FLOPS = 1e8  # of a step so small that all of its batch is taken

Values = Mapping[str, Tensor]
"""The loss and the gradients of one run of a step, as far as this rank has them."""


@dataclass(frozen=True)
class CutVerdict:
    """What verification found, by name; None where nothing differs.

    Attributes:
        moved: the first value that two runs on the same batch do not share.
        mixed: the first value that is another when the batch is cut.
        unlike: in words, which parameter has a gradient that has none on one device, or none that has one.
        drew: in words, what has drawn in backward, where draws are to be one device's.
        compared: whether there was something to compare: a step that has a schedule, and returns a loss.
    """

    moved: str | None = None
    mixed: str | None = None
    unlike: str | None = None
    drew: str | None = None
    compared: bool = True

    def refuse(self, asker: str) -> None:
        """
        Args:
            asker: of the strategy, for messages.

        Raises:
            NotImplementedError: draws that are to be one device's are not.
            RuntimeError: two runs of the step on one batch differ, or its gradients are not those of one device's
                parameters.
        """
        if self.drew is not None:
            raise NotImplementedError(self.drew)
        if self.moved is not None:
            raise RuntimeError(
                f"training_step gave something else in the second of two runs on the same batch: {self.moved}. "
                f"{asker} runs it several times, and undoes what it changes in between, but something moves with each "
                "run that can't be seen: a generator, an iterator, a file, another library's state. Keep it in plain "
                "attributes, buffers or torch's generators, or use TensorParallelStrategy. verify=False trains all the "
                "same."
            )
        if self.unlike is not None:
            raise RuntimeError(self.unlike)


def verify(
    engine: Engine, step: Step, microbatches: int, named: Mapping[str, Tensor], key: tuple[int, ...]
) -> CutVerdict:
    """Run ``step`` whole twice and, if it is to be cut, cut. All ranks of the pipeline must call it.

    Args:
        engine: that will run the step.
        step: the first training step.
        microbatches: into how many its batch will be cut.
        named: the leaves that get gradients on this rank, by name.
        key: of the random draws.
    """
    samples = step.samples
    step = replace(step, batch=map_tensors(cloned, step.batch))  # a step may write into its batch
    count, whole_batch = engine.microbatches_of(step, microbatches), True
    if count > 2 and engine.flops > _FLOPS and _can_be_shortened(step):
        size = -(-samples // count)
        step = replace(step, batch=map_tensors(lambda x: _first(x, 2 * size), step.batch))
        count, whole_batch = 2, False
    whole = _rehearsed(engine, step, 1, named, key)
    tolerances = {name: _tolerance(engine, x) for name, x in whole.items()}

    def difference(cuts: int) -> str | None:  # there are never more than two runs' gradients
        return _first_difference(whole, _rehearsed(engine, step, cuts, named, key), tolerances)

    moved = difference(1)
    cut = None if count == 1 else difference(count)  # all ranks run it, whatever differs on one
    mixed = None if moved else cut
    return CutVerdict(moved, mixed, _unlike(engine, step, whole, whole_batch), next(iter(engine.drew), None))


def _unlike(engine: Engine, step: Step, whole: Values, whole_batch: bool) -> str | None:
    """Whether other parameters have a gradient than on one device, where fakes don't tell which these are."""
    axis, before = engine.axis, generators.global_state()
    with kept(engine.module, engine.overwritten, engine.programs.watch):  # of which hooks may hold something
        told = expected_gradients(replace(step, batch=map_tensors(cloned, step.batch)))
    if whole_batch:
        engine.foretold = (told,)  # the same of the step itself, which comes next
    if not any(axis.all_gather_object(told is None and not engine.inner, "expected")):
        return None

    def told_by(level: float) -> frozenset[str] | None:
        try:
            return real_gradients(step, axis, engine.programs.holds, _drawing(level))
        finally:
            generators.set_global_state(before)

    expected = told_by(0.5)
    mine = {name: bool(x.count_nonzero()) for name, x in whole.items() if name != "the loss"}
    others = axis.all_gather_object(mine, "expected")  # one may have none on one of several ranks
    found = {name for rank in others for name in rank}
    least = {name for rank in others for name, is_any in rank.items() if is_any}
    trained = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    if expected is None:
        return None
    # zeros may be nothing
    unlike = [x for x in trained if x in expected and x not in found or x not in expected and x in least]
    # where draws decide, nothing is expected
    if not unlike or any(told_by(level) not in (expected, None) for level in EXTREMES):
        return None
    return other_gradient(unlike[0], unlike[0] in expected)


def _can_be_shortened(step: Step) -> bool:
    """Whether a batch of fewer samples is a batch: every part of it is a tensor of samples, or a number."""
    parts: list[Any] = [step.batch]
    while parts:
        part = parts.pop()
        if isinstance(part, (dict, list, tuple)):
            parts += part.values() if isinstance(part, dict) else part
        elif isinstance(part, Tensor):
            if part.ndim and part.shape[0] != step.samples:
                return False
        elif not isinstance(part, (int, float, type(None))):
            return False
    return True


def _first(x: Tensor, count: int) -> Tensor:
    """The first samples of ``x``, or all of what has none."""
    return of_its_class(x, plain(x)[:count]) if x.ndim else x


def _rehearsed(engine: Engine, step: Step, count: int, named: Mapping[str, Tensor], key: tuple[int, ...]) -> Values:
    before = generators.global_state()
    batch = map_tensors(cloned, step.batch)
    try:
        with kept(engine.module, engine.overwritten, engine.programs.watch):
            return engine.rehearse(replace(step, batch=batch), count, named, key, _drawing())
    finally:
        generators.set_global_state(before)


@contextmanager
def kept(module: nn.Module, overwritten: Collection[str], watch: Watch) -> Iterator[None]:
    """What modules hold is afterwards what it was, within units, too; of parameters those that are ``overwritten``."""
    parameters = [leaf(p) for name, p in module.named_parameters() if name in overwritten]
    here = [x for x in (*module.buffers(), *parameters) if not (is_elsewhere(x) or x.is_meta)]
    tensors = [x for x in here if type(x.detach()) is Tensor]
    copies = [x.detach().clone() for x in tensors]
    within = Snapshot([(name, m) for name, m in module.named_modules() if name])
    states = [within, watch.everything(hooks=True)[0].copy_tensors()]
    states[1].lend_iterators()
    try:
        yield
    finally:
        for state in states:
            state.restore()
        for x, copy in zip(tensors, copies, strict=True):
            overwrite(x, copy)  # not what it was made of before: the step may have set its `.data`


def _drawing(level: float = 0.5) -> Callable[[], AbstractContextManager[None]]:
    """What is entered around runs that are compared: they draw the same whole and cut only where that is wanted."""
    return uncompiled if RunState.current.streams.whole else partial(_without_draws, level)


@contextmanager
def _without_draws(level: float) -> Iterator[None]:
    # Fused kernels draw within: the plain one draws by functions that are seen here. So do compiled graphs; and what
    # the compiler has once met under such a mode it leaves alone for ever.
    with uncompiled(), sdpa_kernel([SDPBackend.MATH]), Constants(level):
        yield


def _tolerance(engine: Engine, x: Tensor) -> float:
    with engine.context():
        low = torch.is_autocast_enabled(engine.device.type)
    return _COARSE if low else _TOLERANCE.get(x.dtype, _COARSE)


def _first_difference(one: Values, other: Values, tolerances: Mapping[str, float]) -> str | None:
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())[0]
    largest = max((float(x.abs().max()) for name, x in one.items() if x.numel() and name != "the loss"), default=0.0)
    for name, x in one.items():
        y = other[name]
        if x.shape != y.shape:
            return name
        scale = max(float(x.abs().max()) if x.numel() else 0.0, 0.0 if name == "the loss" else largest)
        if scale == scale and not torch.allclose(x, y, rtol=0, atol=tolerances[name] * scale, equal_nan=True):
            return name
    return None


def agreed(verdicts: Sequence[CutVerdict]) -> CutVerdict:
    """One verdict of all ranks'."""
    return CutVerdict(
        next((v.moved for v in verdicts if v.moved), None),
        next((v.mixed for v in verdicts if v.mixed), None),
        next((v.unlike for v in verdicts if v.unlike), None),
        next((v.drew for v in verdicts if v.drew), None),
        all(v.compared for v in verdicts),
    )
