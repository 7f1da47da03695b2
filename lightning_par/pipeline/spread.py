"""From a module to its stages: peek a batch, survey a step, plan, study, send away; and back."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.layout import Groups, make_message_groups
from lightning_par.peek import peek_batch
from lightning_par.pipeline.engine import Engine
from lightning_par.pipeline.located import Program, Run, UnitCall, intercept_units, release_units
from lightning_par.pipeline.microbatch import SamplesMixError
from lightning_par.pipeline.plan import StagePlan, make_stage_plan
from lightning_par.pipeline.prepare import Programs
from lightning_par.pipeline.schedule import make_forward_schedule, make_schedule, place_stages
from lightning_par.pipeline.settings import Settings
from lightning_par.pipeline.simulate import microbatches_for, predicted_bubble
from lightning_par.pipeline.step import Step
from lightning_par.pipeline.study import study, survey
from lightning_par.pipeline.table import show_stages
from lightning_par.pipeline.tied import make_holder_axes, sum_over_holders
from lightning_par.pipeline.units import Call
from lightning_par.pipeline.watch import Watch
from lightning_par.pipeline.weights import Placement, bring_back, copies_of, send_away

STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
Homes = dict[str, tuple[int, ...]]
BUBBLE = 0.1  # that "auto" cuts the batch for


class Spread:
    """One module over the stages of the pipeline axis, in one run of a Trainer's entry point.

    Args:
        groups: the mesh axes.
        settings: what the user asked for.
        timeout: of process groups.
    """

    def __init__(self, groups: Groups, settings: Settings, timeout: timedelta) -> None:
        self.groups, self.settings, self.timeout = groups, settings, timeout
        self.axis = groups.pipeline
        self.stages = settings.stage_count(self.axis.size)
        self.at = place_stages(settings.schedule, self.axis.size, self.stages)
        self.placement = Placement({})
        self.microbatches = 1
        self.reason: str | None = None
        self.coupled = False
        self.engine: Engine | None = None
        self.plan: StagePlan | None = None

    # ----------------------------------------------------------------------------------------------------- at the start

    def apply(self, trainer: Any, module: nn.Module, device: torch.device) -> Engine:
        """Plan on the first rank, keep this rank's stages. All ranks must call it.

        Raises:
            ValueError: the module can't be cut as asked; on every rank.
        """
        started = time.monotonic()
        make_message_groups(self.groups.layout, self.timeout, self._pairs())
        batch = peek_batch(trainer, module)
        entry = trainer.state.fn.value
        name = STEPS[entry]
        rest = _indices(getattr(module, name))
        shared = (trainer, trainer.strategy, *trainer.loggers, *trainer.callbacks)
        context = trainer.strategy.precision_plugin.forward_context
        step = Step(module, name, batch, rest, context, entry == "fit", device, shared)
        training = {m: m.training for m in module.modules()}
        if entry != "fit":  # as the loop will do
            module.eval()
        try:
            self.plan, homes, program = self._agree(lambda: self._decide(step, batch is not None))
        finally:
            for m, mode in training.items():
                m.training = mode
        self.placement = self._place(module, homes, program)
        if self.groups.world.rank == 0:
            self._show(module, step.grad, time.monotonic() - started)
        axes = make_holder_axes(self.placement, self.groups, self.timeout)
        for copied in (module, *copies_of(module, trainer.callbacks)):
            send_away(copied, self.placement, self.axis)
        intercept_units(module, tuple(homes))
        containers = [(path, m) for path, m in module.named_modules() if not _within(path, homes)]
        watch = Watch(module, containers, around=_around)
        names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}

        def finish(grads: dict[Tensor, Tensor | None]) -> dict[Tensor, Tensor | None]:
            named = {names[p]: g for p, g in grads.items()}
            like = {names[p]: p for p in grads}
            summed = sum_over_holders(named, self.placement, axes, like)
            return {p: summed[names[p]] for p in grads}

        programs = Programs(module, homes, self.at, watch, lambda name: self.placement.of(name, self.axis.size))
        self.engine = Engine(module, self.axis, device, self.settings.schedule, self.at, programs, finish)
        self.engine.coupled = self.coupled
        return self.engine

    def undo(self, module: nn.Module, also: Iterable[Any] = ()) -> None:
        """Give every rank the whole module again. All ranks must call it."""
        release_units(module)
        bring_back(module, self.axis, also)

    def _pairs(self) -> list[tuple[int, int]]:
        # From the last to the first go forwards that run through all stages again.
        return sorted({(a, b) for a, b in zip((*self.at, *self.at), self.at[1:] + self.at[:1]) if a != b})

    def _agree(self, decide: Callable[[], Any]) -> Any:
        """What the first rank decides, on all ranks; all decide, since the user's step may wait for its peers."""
        outcome: Any = None
        failure: Exception | None = None
        try:
            outcome = decide()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        told = None if failure is None else f"{failure}" or repr(failure)
        failures = self.groups.world.all_gather_object(told, "plan")
        if failure is not None:
            raise failure
        if any(failures):
            raise ValueError(next(text for text in failures if text))
        return outcome

    def _decide(self, step: Step, has_batch: bool) -> tuple[StagePlan, dict[str, tuple[int, ...]], Program | None]:
        root = survey(step) if has_batch else _static(step.module)
        plan, homes = self._plan(step.module, root, ())
        if not has_batch:
            return plan, homes, None
        wanted = self._wanted(step)
        opened: list[str] = []
        program, reason = self._try(step, homes, wanted)
        while isinstance(reason, SamplesMixError) and (unit := reason.unit) is not None and unit not in opened:
            # What the module does with the whole batch's masks may be harmless where it is seen.
            if not any(True for _ in step.module.get_submodule(unit).children()):
                break  # nothing in it to see
            opened.append(unit)
            again, again_homes = self._plan(step.module, root, opened)
            if again.calls == plan.calls:
                break
            plan, homes = again, again_homes
            program, reason = self._try(step, homes, wanted)
        if program is None:
            self._take_one(step, reason)
            program = study(step, homes, self.stages, 1)
        direct = {step.module.get_parameter(name) for name in program.uses if name not in homes}
        unused = {
            path
            for path in homes
            if path not in plan.units and direct & {*step.module.get_submodule(path).parameters(recurse=False)}
        }
        return plan, {path: at for path, at in homes.items() if path not in unused}, program

    def _plan(
        self, module: nn.Module, root: Call, opened: Sequence[str]
    ) -> tuple[StagePlan, dict[str, tuple[int, ...]]]:
        asker = f"{self.settings.asker} over {self.axis.size} ranks with schedule {self.settings.schedule!r}"
        name, wishes = type(module).__name__, self.settings.stages
        plan = make_stage_plan(root, self.stages, wishes, opened=opened, asker=asker, module=name)
        homes: dict[str, tuple[int, ...]] = {}
        for path, stage in plan.calls:
            homes[path] = (*homes.get(path, ()), stage)
        return plan, {**homes, **_uncalled(module, homes)}

    def _wanted(self, step: Step) -> int:
        """How many microbatches the first batch, of at least one sample, is cut into if its samples allow it."""
        asked, samples = self.settings.microbatches, max(1, step.samples)
        self.microbatches = asked if isinstance(asked, int) else self._automatic(samples)
        return min(self.microbatches, samples)

    def _try(
        self, step: Step, homes: dict[str, tuple[int, ...]], wanted: int
    ) -> tuple[Program | None, Exception | None]:
        try:
            return study(step, homes, self.stages, wanted), None
        except SamplesMixError as error:
            return None, error

    def _take_one(self, step: Step, reason: Exception | None) -> None:
        """Run the batch whole.

        Raises:
            ValueError: the user asked for another count, and it is a training step.
        """
        asked = self.settings.microbatches
        if isinstance(asked, int) and asked > 1 and step.grad:
            if self.settings.allow_batch_coupling:
                self.coupled, self.reason = True, f"each a batch of its own, though {reason}"
                return
            raise ValueError(
                f"microbatches={asked}: the samples of a batch need one another: {reason}. Cut apart they would train "
                "another model. Write microbatches='auto', which takes 1 here, or allow_batch_coupling=True if each "
                "microbatch may be a batch of its own."
            )
        self.reason = f"samples need one another: {reason}"
        if step.grad:
            self.microbatches = 1

    def _automatic(self, samples: int) -> int:
        name, ranks = self.settings.schedule, self.axis.size
        count = microbatches_for(name, ranks, BUBBLE, most=samples, stages=self.stages)
        bubble = predicted_bubble(name, ranks, count, stages=self.stages)
        enough = "for a bubble of at most 10%" if bubble <= BUBBLE else f"as many as a batch has samples ({samples})"
        self.reason = f"'auto', {enough}"
        return count

    def _place(self, module: nn.Module, homes: Mapping[str, tuple[int, ...]], program: Program | None) -> Placement:
        """Which ranks hold which tensors: those of the stages that use them, and what no stage uses the last."""
        ranks: dict[int, set[int]] = {}
        for path, stages in homes.items():
            unit = module.get_submodule(path)
            for x in (*unit.parameters(), *unit.buffers()):
                ranks.setdefault(id(x), set()).update(self.at[stage] for stage in stages)
        for name, stages_used in (program.uses if program is not None else {}).items():
            if name not in homes:
                p = module.get_parameter(name)
                ranks.setdefault(id(p), set()).update(self.at[stage % self.stages] for stage in stages_used)
        last = {self.at[-1]}
        holders = {name: tuple(sorted(ranks.get(id(p), last))) for name, p in module.named_parameters()}
        holders |= {name: tuple(sorted(ranks[id(b)])) for name, b in module.named_buffers() if id(b) in ranks}
        return Placement(holders)

    def _show(self, module: nn.Module, trains: bool, seconds: float) -> None:
        assert self.plan is not None
        schedule = make_forward_schedule(self.at, self.microbatches)
        if trains:
            schedule = make_schedule(self.settings.schedule, self.axis.size, self.microbatches, self.stages)
        show_stages(self.plan, schedule, self.reason, self.placement.holders, module, self.groups.layout, seconds)


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


def _within(path: str, homes: Mapping[str, Any]) -> bool:
    return any(path == unit or path.startswith(f"{unit}.") for unit in homes)


def _uncalled(module: nn.Module, homes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Modules that the step does not call: the outermost that hold no unit live on the last stage."""
    last = max((stage for stages in homes.values() for stage in stages), default=0)
    found: dict[str, tuple[int, ...]] = {}
    for path, child in module.named_modules():
        if not path or _within(path, homes) or _within(path, found):
            continue
        if any(unit.startswith(f"{path}.") for unit in homes):
            continue
        if any(True for _ in child.parameters()):
            found[path] = (last,)
    return found


def _static(module: nn.Module) -> Call:
    """Where there was no batch to look at: modules in the order in which they were made, parameters as their cost."""

    def call(path: str, m: nn.Module) -> Call:
        children = [(f"{path}.{name}" if path else name, child) for name, child in m.named_children()]
        numel = sum(p.numel() for p in m.parameters())
        return Call(path, float(numel), numel, tuple(call(*child) for child in children))

    return call("", module)


def _indices(function: Callable[..., Any]) -> tuple[int, ...]:
    """What Lightning gives a step beside the batch, the first time."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(0 for p in positional[1:] if p.name in ("batch_idx", "dataloader_idx") or p.default is p.empty)


__all__ = ["STEPS", "Spread", "UnitCall"]
