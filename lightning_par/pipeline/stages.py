"""From a module to its stages: agree on a plan, send weights away, let units be called from there; and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn

from lightning_par.mesh.agree import agree
from lightning_par.mesh.handshake import Meeting
from lightning_par.mesh.layout import Groups
from lightning_par.pipeline.between_steps.weights.send_away import (
    Placement,
    agree_on_buffers,
    bring_back,
    copies_of,
    place,
    send_away,
)
from lightning_par.pipeline.cut_search import CutSearch
from lightning_par.pipeline.effects.metrics import as_event
from lightning_par.pipeline.effects.user_hooks import Hooks
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.plan.stage_order import Order
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.plan.uncalled import within
from lightning_par.pipeline.plan.units import ModuleCall, ancestors, list_names
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.program.programs import Programs
from lightning_par.pipeline.run.engine import Engine
from lightning_par.pipeline.run.tied_gradients import TiedGradients, make_holder_axes
from lightning_par.pipeline.run.unit_calls import intercept_units, release_units
from lightning_par.private.compiler import compiler_of
from lightning_par.sharded.packed_parameters import packed_parameters
from lightning_par.sharded.run_state import RunState
from lightning_par.strategies.compiled_layers import compile_units, restore_calls
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

    def plan_once(self) -> bool:
        """From now on plan all calls of a module on one rank, if that is another plan; returns whether it is."""
        return False

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
        refuse_packed(first.module)
        _refuse_scripted(first.module)
        started = time.monotonic()
        module, step = first.module, first.step()
        with _as_the_loop_will_run(module, step):
            heard = first.heard
            plan, stages, program, alike = self._agreed(lambda: CutSearch(self).decide(step, heard))
        if program is not None and RunState.current.streams.whole:
            _refuse_compiled_draws(module, program, first.trainer.strategy.compiler)
        self.placement = place(module, stages, program)
        self.check(plan, module, self.placement)
        if self.groups.world.rank == 0:
            self.show(plan, module, program, step.grad, time.monotonic() - started)
        axes = make_holder_axes(self.placement, self.groups, self.timeout)
        for copied in (module, *copies_of(module, first.trainer.callbacks)):
            send_away(copied, self.placement, self.axis)
        _intercept(first, stages)
        programs = self._programs(module, stages)
        tied = TiedGradients(module, self.placement, axes)
        if program is not None and alike:
            programs.foresee(step, program)
        engine = Engine(module, self.axis, first.device, self.order(), programs, tied.finish)
        engine.coupled = self.coupled
        return engine

    def _programs(self, module: nn.Module, stages: Stages) -> Programs:
        containers = [(path, m) for path, m in module.named_modules() if not within(path, stages.homes)]
        watch = Watch(module, containers, around=as_event)
        hooks = Hooks(module, stages.homes, self.axis, Meeting(self.axis, self.timeout, "hooks"))
        return Programs(module, stages, watch, lambda name: self.placement.of(name, self.axis.size), hooks)

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


def _refuse_compiled_draws(module: nn.Module, program: Program, whole: Any) -> None:
    """Raises ValueError where a module is compiled, by itself or within ``module``, that draws."""
    for path in (event.func for event in program.events if isinstance(event.func, str) and event.drawn):
        around = [module.get_submodule(other) for other in (*ancestors(path), path)]
        if whole is not None or any(compiler_of(m) is not None for m in (*around, *around[-1].modules())):
            raise ValueError(
                f"{path!r} is compiled and draws random numbers: compiled code draws numbers of its own, so that one "
                "device's can't be had. Write draws='per_shard', the default, or leave it as it is written."
            )


def _intercept(first: FirstStep, stages: Stages) -> None:
    """Calls of units ask the run that is on, and run compiled where the user compiles."""
    module = first.module
    _release(module)  # after a run that failed
    cut = compile_units(module, stages.homes, first.trainer.strategy.compiler)
    if cut and first.world.rank == 0:
        log.warning("Compiled layer by layer, and run as written around the layers: %s.", list_names(cut))
    intercept_units(module, stages.homes, stages.hands_out)


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


def refuse_packed(module: nn.Module) -> None:
    """Raises ValueError where ``module`` has a quantized weight."""
    for name, what in packed_parameters(module).items():
        raise ValueError(
            f"{name!r} is {what}, a quantized weight: its class alone knows what it means, so that it can't be placed "
            "on one rank and brought back. Under a pipeline or a placement load the model without quantization, or "
            'write HybridParallelStrategy(data_parallel="fsdp"), TensorParallelStrategy or '
            "SequenceParallelStrategy, which keep it whole on each rank."
        )


def _refuse_scripted(module: nn.Module) -> None:
    """Raises ValueError where a module within ``module`` that `torch.jit.script` made has weights."""
    for name, m in module.named_modules():
        if isinstance(m, torch.jit.ScriptModule) and any(True for _ in m.parameters()):
            raise ValueError(
                f"{name!r} is a module of torch.jit.script, which keeps its weights where no other rank can take them "
                "over. Under a pipeline or a placement leave it as it was written, or script the functions alone "
                "that it calls."
            )
