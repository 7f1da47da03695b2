"""From a module to its stages: survey a step, plan, study, send away; and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from lightning_par.fsdp.prefetch import in_use, parts_of_gradients
from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.mesh.agree import agree
from lightning_par.mesh.handshake import Meeting
from lightning_par.mesh.layout import Groups
from lightning_par.pipeline.between_steps.send_away import Placement, agree_on_buffers, bring_back, copies_of, send_away
from lightning_par.pipeline.effects.user_hooks import Hooks
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.plan.stage_order import Order
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.plan.units import ModuleCall, ancestors, close, list_names, walk
from lightning_par.pipeline.program.make_program import OutsideWriteError
from lightning_par.pipeline.program.prepare import Programs
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.run.engine import Engine
from lightning_par.pipeline.run.located import Run
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.pipeline.run.tied_gradients import make_holder_axes, sum_over_holders
from lightning_par.pipeline.run.unit_calls import intercept_units, release_units
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.pipeline.trial.study import study, survey
from lightning_par.pipeline.trial.survey import Survey
from lightning_par.private.modules import ModuleTree
from lightning_par.sharded.packed_parameters import packed_parameters
from lightning_par.strategies.compiled_layers import compile_units, restore_calls
from lightning_par.strategies.entry_points import has_start_hooks
from lightning_par.trial.first_step import FirstStep
from lightning_par.trial.step import Step

log = logging.getLogger(__name__)


class Spread:
    """One module over the ranks of the pipeline axis, in one run of a Trainer's entry point.

    Subclasses say how, by the methods before `apply`.

    Args:
        groups: the mesh axes.
        asked: into how many microbatches the user wants a batch cut.
        allow_coupling: whether these may be batches of their own where samples need one another.
        timeout: of process groups.

    Attributes:
        weighs: whether what modules cost is held against a limit, so that it must be that of the batch exactly.
    """

    takes_one = "microbatches=1"
    """What the user may write to have the batch run whole."""

    def __init__(self, groups: Groups, asked: int | Literal["auto"], allow_coupling: bool, timeout: timedelta) -> None:
        self.groups, self.asked, self.allow_coupling, self.timeout = groups, asked, allow_coupling, timeout
        self.axis = groups.pipeline
        self.placement = Placement({})
        self.microbatches = 1
        self.reason: str | None = None
        self.coupled = False
        self.weighs = False

    def plan(self, module: nn.Module, root: ModuleCall, opened: Collection[str]) -> tuple[Any, Stages]:
        """What is shown, and how steps are cut.

        Args:
            module: whole.
            root: the recorded step.
            opened: modules that must not be called as a whole.
        """
        raise NotImplementedError

    def order(self) -> Order:
        """In which order the ranks run stages."""
        raise NotImplementedError

    def show(self, plan: Any, module: nn.Module, program: Program | None, trains: bool, seconds: float) -> None:
        """Print what was decided, on the first rank."""
        raise NotImplementedError

    def fingerprint(self, plan: Any) -> str | None:
        """What must be the same on all ranks, where code of the user's decides."""
        return None

    def check(self, plan: Any, module: nn.Module, placement: Placement) -> None:
        """Refuse a plan that can't be, once it is known who holds what."""

    def automatic(self, samples: int) -> int:
        """How many microbatches a batch of ``samples`` is cut into where the user leaves it open."""
        return 1

    # ----------------------------------------------------------------------------------------------------- at the start

    def check_alone(self, first: FirstStep) -> None:
        """Where a copy of the model has one device: refuse what would be refused elsewhere. All ranks must call it."""

    def apply(self, first: FirstStep) -> Engine:
        """Plan on all ranks, keep what is this rank's. All ranks must call it.

        Raises:
            ValueError: the module can't be cut as asked; on every rank.
        """
        _refuse_packed(first.module)
        started = time.monotonic()
        module, step = first.module, first.step()
        with _as_the_loop_will_run(module, step):
            heard = first.heard
            plan, stages, program, alike = self._agreed(
                lambda: self._decide_as_started(step, step.batch is not None, heard)
            )
        self.placement = _place(module, stages, program)
        self.check(plan, module, self.placement)
        if self.groups.world.rank == 0:
            self.show(plan, module, program, step.grad, time.monotonic() - started)
        axes = make_holder_axes(self.placement, self.groups, self.timeout)
        for copied in (module, *copies_of(module, first.trainer.callbacks)):
            send_away(copied, self.placement, self.axis)
        _release(module)  # after a run that failed
        cut = compile_units(module, stages.homes, first.trainer.strategy.compiler)
        if cut and first.world.rank == 0:
            log.warning("Compiled layer by layer, and run as written around the layers: %s.", list_names(cut))
        intercept_units(module, tuple(stages.homes))
        containers = [(path, m) for path, m in module.named_modules() if not within(path, stages.homes)]
        watch, tree = Watch(module, containers, around=_around), ModuleTree(module)

        def finish(grads: dict[Tensor, Tensor | None]) -> dict[Tensor, Tensor | None]:
            known = self.placement.holders  # what was registered since belongs to no stage
            held = {name: p for name, p in tree.parameters() if name in known and in_use(p) in grads}
            like = {name: in_use(p) for name, p in held.items()}
            named = {name: grads[x] for name, x in like.items()}
            summed = sum_over_holders(named, self.placement, axes, like)
            stored: dict[Stored, Tensor | None] = {
                p: summed.pop(name) for name, p in held.items() if isinstance(p, Stored) and like[name] is not p.local
            }
            mine = set(map(id, like.values()))  # of a stored weight the part alone is kept, not the whole
            return (
                {x: g for x, g in grads.items() if id(x) not in mine}
                | {like[name]: g for name, g in summed.items()}
                | {p.local: g for p, g in parts_of_gradients(stored).items()}
            )

        hooks = Hooks(module, stages.homes, self.axis, Meeting(self.axis, self.timeout, "hooks"))
        programs = Programs(module, stages, watch, lambda name: self.placement.of(name, self.axis.size), hooks)
        if program is not None and alike:
            programs.foresee(step, program)
        engine = Engine(module, self.axis, first.device, self.order(), programs, finish)
        engine.coupled = self.coupled
        return engine

    def undo(self, module: nn.Module, also: Iterable[Any] = ()) -> None:
        """Give every rank the whole module again. All ranks must call it."""
        _release(module)
        agree_on_buffers(module, self.axis)
        bring_back(module, self.axis, also)

    def _agreed(
        self, decide: Callable[[], tuple[Any, Stages, Program | None]]
    ) -> tuple[Any, Stages, Program | None, bool]:
        """What is decided, on all ranks, and whether all would cut a batch alike."""
        world = self.groups.world
        outcome, answers = agree(world, decide, lambda outcome: (self.fingerprint(outcome[0]), self.microbatches))
        counts = {count for _, count in answers}  # hooks may go by the rank
        self.microbatches = min(counts)
        for rank, (theirs, _) in enumerate(answers):
            if theirs != answers[0][0]:
                raise ValueError(
                    f"The layers are placed in another way on rank {rank} than on rank 0. On rank 0:\n{answers[0][0]}\n"
                    f"On rank {rank}:\n{theirs}\nThe placement must not depend on the rank."
                )
        return *outcome, len(counts) == 1

    def _decide_as_started(
        self, step: Step, has_batch: bool, known: Survey | None
    ) -> tuple[Any, Stages, Program | None]:
        try:
            return self._decide(step, has_batch, known)
        except Exception:  # it may lack what `on_train_epoch_start` sets
            if not has_batch or not has_start_hooks(step.module):
                raise
            return self._decide(replace(step, starts=True), has_batch, None)

    def _decide(self, step: Step, has_batch: bool, known: Survey | None) -> tuple[Any, Stages, Program | None]:
        if not has_batch:
            return *self.plan(step.module, _static(step.module), ()), None
        wanted = self._wanted(step)
        surveyed = known or survey(step, one_more=wanted > 1 and not self.weighs)
        plan, stages = self.plan(step.module, surveyed.root, ())
        if not surveyed.ends:  # it will run unit by unit
            return plan, stages, None
        first = _Cut(surveyed, plan, stages, *self._try(step, stages, wanted, surveyed))
        cut = self._improved(step, first, wanted, opens=True)
        if isinstance(cut.reason, UnitError):
            other = self._improved(step, first, wanted, opens=False)
            cut = cut if isinstance(other.reason, UnitError) else other
        program, reason = cut.program, cut.reason
        if isinstance(reason, UnitError) and wanted > 1:
            program, said = self._try(step, cut.stages, 1)
            self._leave_whole(step, reason if program is not None else None)
            reason = reason if said is None else said
        if program is None and isinstance(reason, SamplesMixError):
            self._take_one(step, reason)
            # What was opened to see whether samples mix is of no use then.
            for whole in (first, *([cut.unmixed] if cut.unmixed else []), cut):
                program, said = self._try(step, whole.stages, 1)
                if program is not None:
                    return whole.plan, self._without_unused(step.module, whole.stages, program), program
            reason = said or reason
        if program is None:
            raise ValueError(str(reason))
        return cut.plan, self._without_unused(step.module, cut.stages, program), program

    def _improved(self, step: Step, cut: _Cut, wanted: int, opens: bool) -> _Cut:
        """``cut``, with units opened, or else closed, until it can be run or nothing more helps."""
        mixing: _Cut | None = None
        met: list[str] = []
        while cut.reason is not None and cut.reason.unit is not None and met.count(cut.reason.unit) < 2:
            ways = _ways(step.module, cut, cut.reason)
            for surveyed, opened in (ways if opens else ways[::-1])[met.count(cut.reason.unit) :]:
                try:
                    plan, stages = self.plan(step.module, surveyed.root, opened)
                except ValueError:  # it is needed as a unit, or apart
                    continue
                if plan != cut.plan:
                    break
            else:
                break
            met.append(cut.reason.unit)
            unmixed = cut.unmixed or (cut if isinstance(cut.reason, SamplesMixError) else None)
            other = _Cut(surveyed, plan, stages, *self._try(step, stages, wanted, surveyed), opened, unmixed)
            if isinstance(other.reason, OutsideWriteError):  # it must stay a unit
                break
            if isinstance(cut.reason, SamplesMixError) and isinstance(other.reason, UnitError):
                mixing = cut
            cut = other
        # Where what was opened to see whether samples mix can't be run, that was no use.
        return mixing if mixing is not None and isinstance(cut.reason, UnitError) else cut

    def _without_unused(self, module: nn.Module, stages: Stages, program: Program) -> Stages:
        """A module that is never called is no unit where the step itself reads its parameters."""
        direct = {module.get_parameter(name) for name in program.uses if name not in stages.homes}
        unused = {
            path
            for path in stages.homes
            if path not in program.uses and direct & {*module.get_submodule(path).parameters(recurse=False)}
        }
        return stages.without(unused)

    def _wanted(self, step: Step) -> int:
        """How many microbatches the first batch, of at least one sample, is cut into if its samples allow it."""
        samples = max(1, step.samples)
        self.microbatches = self.asked if isinstance(self.asked, int) else self.automatic(samples)
        return min(self.microbatches, samples)

    def _try(
        self, step: Step, stages: Stages, wanted: int, surveyed: Survey | None = None
    ) -> tuple[Program | None, SamplesMixError | UnitError | None]:
        try:
            return study(step, stages, wanted, surveyed=surveyed), None
        except (SamplesMixError, UnitError) as error:
            return None, error

    def _leave_whole(self, step: Step, reason: UnitError | None) -> None:
        """Run the batch whole, since modules can be taken as they are only then; not without a ``reason``.

        Raises:
            ValueError: the user asked for another count, and it is a training step.
        """
        if reason is not None and step.grad:
            if isinstance(self.asked, int) and self.asked > 1:
                raise ValueError(f"microbatches={self.asked}: {reason} Or write {self.takes_one}.")
            self.reason, self.microbatches = f"cut apart, {reason}", 1

    def _take_one(self, step: Step, reason: Exception | None) -> None:
        """Run the batch whole.

        Raises:
            ValueError: the user asked for another count, and it is a training step.
        """
        if isinstance(self.asked, int) and self.asked > 1 and step.grad:
            if self.allow_coupling:
                self.coupled, self.reason = True, f"each a batch of its own, though {reason}"
                return
            raise ValueError(
                f"microbatches={self.asked}: the samples of a batch need one another: {reason}. Cut apart they would "
                f"train another model. Write {self.takes_one}, or allow_batch_coupling=True if each microbatch may be "
                "a batch of its own."
            )
        self.reason = f"samples need one another: {reason}"
        if step.grad:
            self.microbatches = 1


def _release(module: nn.Module) -> None:
    release_units(module)
    restore_calls(module)


@contextmanager
def _as_the_loop_will_run(module: nn.Module, step: Step) -> Iterator[None]:
    training = {m: m.training for m in module.modules()}
    if not step.grad:
        for m in training:  # `eval` and `train` may be the user's
            m.training = False
    try:
        yield
    finally:
        for m, mode in training.items():
            m.training = mode


@dataclass(frozen=True)
class _Cut:
    """A step cut into stages: what it does, the plan, and the program, or the reason why there is none.

    Attributes:
        opened: modules that are no units for a reason that came up.
        unmixed: the cut before more was opened to see whether samples mix.
    """

    surveyed: Survey
    plan: Any
    stages: Stages
    program: Program | None
    reason: SamplesMixError | UnitError | None
    opened: tuple[str, ...] = ()
    unmixed: _Cut | None = None


def _ways(module: nn.Module, cut: _Cut, reason: SamplesMixError | UnitError) -> list[tuple[Survey, tuple[str, ...]]]:
    """What may be done about the unit of a ``reason``: the calls, and what is opened of them."""
    assert reason.unit is not None
    surveyed, root, opened = cut.surveyed, cut.surveyed.root, cut.opened
    # What the module does with the whole batch's masks may be harmless where it is seen, and what it keeps from one
    # call to the next is at hand where its code is the step's own, whatever ranks hold its weights.
    mixes, inner = isinstance(reason, SamplesMixError), module.get_submodule(reason.unit).children()
    closed = {call.path for call in walk(root) if call.closed is not None}
    units = reason.units if isinstance(reason, UnitError) and reason.units else (reason.unit,)
    seen = reason.unit not in closed and not (mixes and next(inner, None) is None)  # there is something in it to see
    ways = [(surveyed, (*opened, *(unit for unit in units if unit not in closed)))] if seen else []
    alike = [path for path in _alike(module, reason.unit) if path in cut.stages.homes and path not in closed]
    if mixes and ways and len(alike) > 1:  # it is most likely the same in all layers
        ways.insert(0, (surveyed, (*opened, *alike)))
    # What other code takes from within it is at hand in the module around, where that is called as a whole.
    called = {call.path for call in walk(root)}
    around = next((path for path in ancestors(reason.unit) if path in called), None)
    if mixes or around is None or around in opened:
        return ways
    others = {path for path in _alike(module, around) if path not in opened}
    closer = close(root, others, f"its code needs what is within {reason.unit!r}")
    return [*ways, (replace(surveyed, root=closer), opened)]


def _alike(module: nn.Module, path: str) -> list[str]:
    """The modules of one class with that at ``path``."""
    kind = type_before_parametrizations(module.get_submodule(path))
    return [other for other, m in module.named_modules() if other and type_before_parametrizations(m) is kind]


def _refuse_packed(module: nn.Module) -> None:
    for name, what in packed_parameters(module).items():
        raise ValueError(
            f"{name!r} is {what}, a quantized weight: its class alone knows what it means, so that it can't be placed "
            "on one rank and brought back. Under a pipeline or a placement load the model without quantization, or "
            'write HybridParallelStrategy(data_parallel="fsdp"), TensorParallelStrategy or '
            "SequenceParallelStrategy, which keep it whole on each rank."
        )


def _place(module: nn.Module, stages: Stages, program: Program | None) -> Placement:
    """Which ranks hold which tensors: those of the stages that use them, and what no stage uses the last."""
    ranks: dict[int, set[int]] = {}
    for path in stages.homes:
        unit = module.get_submodule(path)
        for x in (*unit.parameters(), *unit.buffers()):
            ranks.setdefault(id(x), set()).update(stages.holders(path))
    for name, used in (program.uses if program is not None else {}).items():
        if program is not None and name not in stages.homes:
            ranks.setdefault(id(module.get_parameter(name)), set()).update(program.at[stage] for stage in used)
    last = {stages.last}
    holders = {name: tuple(sorted(ranks.get(id(p), last))) for name, p in module.named_parameters()}
    holders |= {name: tuple(sorted(ranks[id(b)])) for name, b in module.named_buffers() if id(b) in ranks}
    return Placement(holders)


def _around(name: str, metric: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call of a metric in a step: one event of the run that is on."""
    run = Run.current
    if run is None or run.depth:
        return call(*args, **kwargs)
    run.depth += 1
    try:
        return run.metric(metric, name.rpartition(".")[2], call, run.followed(args), run.followed(kwargs))
    finally:
        run.depth -= 1


def within(path: str, homes: Collection[str]) -> bool:
    """Whether ``path`` is one of the units, or lies in one."""
    return any(path == unit or path.startswith(f"{unit}.") for unit in homes)


def uncalled(module: nn.Module, homes: Collection[str], opened: Collection[str] = ()) -> list[str]:
    """Modules with parameters that the step does not call: the outermost that hold no unit, and are not ``opened``."""
    found: list[str] = []
    for path, child in module.named_modules():
        if not path or path in opened or within(path, homes) or within(path, found):
            continue
        if any(unit.startswith(f"{path}.") for unit in homes):
            continue
        if any(True for _ in child.parameters()):
            found.append(path)
    return found


def _static(module: nn.Module) -> ModuleCall:
    """Where there was no batch to look at: modules in the order in which they were made, parameters as their cost."""

    def call(path: str, m: nn.Module) -> ModuleCall:
        children = [(f"{path}.{name}" if path else name, child) for name, child in m.named_children()]
        numel = sum(p.numel() for p in m.parameters())
        return ModuleCall(path, float(numel), numel, tuple(call(*child) for child in children))

    return call("", module)
