"""A step about to run: its program, and what depends on the batch alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.effects.random_draws import is_standing
from lightning_par.pipeline.effects.user_hooks import Hooks
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.program.batch_values import Memo
from lightning_par.pipeline.program.dry_run import ChangedError, DryRun
from lightning_par.pipeline.program.lent_buffers import lacking_buffers
from lightning_par.pipeline.program.microbatch_values import share_of
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.program.tape import Tape, may_be_taped
from lightning_par.pipeline.run.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.pipeline.trial.code_attributes import Attributes
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.pipeline.trial.study import study
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.modules import ModuleTree
from lightning_par.python_state import generators
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.trial.step import Step
from lightning_par.trial.trainer_stand_ins import numbers_of

MOST_STUDIES = 12  # of batches of one shape, for what modules and trainer say, before they are left whole
MOST_PROGRAMS = 32  # of one signature, of which a step takes one or another


@dataclass
class Part:
    """What is known of one microbatch before it runs.

    Attributes:
        step: with the whole batch, or with the microbatch where that is trained as a batch of its own.
        program: of the step.
        memo: what depends on the batch alone.
        before: where the generators of numpy and `random` stand before it.
        axis: the microbatch's place among the others; None where the step sees no others.
        share: by which its loss counts.
        apart: whether it is a batch of its own.
        tape: what the dry run saw of the step, where stages may be run by it.
    """

    step: Step
    program: Program
    memo: Memo
    before: tuple[Any, Any]
    axis: MicrobatchAxis | None = None
    share: float = 1.0
    apart: bool = False
    tape: Tape | None = None


@dataclass
class Prepared:
    """A step about to run: its microbatches, and where random numbers stand before and after it."""

    parts: list[Part]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    coupled: bool = False

    @property
    def step(self) -> Step:
        return self.parts[0].step

    @property
    def program(self) -> Program:
        return self.parts[0].program

    @property
    def whole(self) -> Any:
        """The batch that the step was given, None where it was given parts of it as batches of their own."""
        return None if self.coupled else self.step.batch

    @property
    def cut(self) -> bool:
        """Whether the step sees the whole batch, of which each run computes a part."""
        return len(self.parts) > 1 and not self.coupled


@dataclass
class Programs:
    """The programs of a module's steps, made when they are first met.

    Args:
        module: the LightningModule.
        stages: how they are cut.
        watch: the module's Python state.
        holds: the ranks that hold a parameter.
        hooks: those within units.
    """

    module: nn.Module
    stages: Stages
    watch: Watch
    holds: Callable[[str], tuple[int, ...]]
    hooks: Hooks
    made: dict[Any, list[Program]] = field(default_factory=dict)
    refused: dict[Any, str] = field(default_factory=dict)
    studies: dict[Any, int] = field(default_factory=dict)
    deciding: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.attributes = Attributes(self.module, self.stages.homes)
        self.tree = ModuleTree(self.module)

    def prepare(self, step: Step, microbatches: int) -> Prepared:
        """Find the program of ``step``, made before or made now, and compute what depends on the batch alone."""
        samples = step.samples
        if not samples and tensors_in(step.batch):
            raise ValueError(f"{step.name}: the batch is empty: its first tensor has {samples} samples.")
        wanted = max(1, min(microbatches, samples))  # so that no microbatch is empty
        self.hooks.agree()
        signature = self._signature(step, wanted)
        first, tried = self._is_first(signature), step
        while True:
            known = self.made.setdefault(signature, [])
            start = generators.global_state()
            for program in known:
                ready = self._dry(step, program, start)
                if ready is not None:
                    self.made.setdefault(self._signature(step, wanted), known)  # which it may have changed
                    known.remove(program)  # to the front: the next step is likely to be the same
                    known.insert(0, program)
                    return ready
                generators.set_global_state(start)
            del known[MOST_PROGRAMS:]
            if known and known[0] is self._fresh:  # it was made of this very step
                raise RuntimeError(
                    f"{step.name} does something else each time it runs, first at {self._change}. {self.stages.ranks} "
                    "ranks that share the model can't follow that: what a step does must depend on the batch, the "
                    "module's attributes and random numbers of torch, numpy or `random` alone."
                )
            if first:  # on all ranks: what a layer does may go by buffers that one of them holds
                self.hooks.meeting("met a kind of batch for the first time", "Give all ranks the same batches.")
                first, tried = False, replace(step, lent=lacking_buffers(self.module, self.hooks.axis))
            wanted = self._study(tried, wanted, signature, known)
            signature = self._signature(step, wanted)

    _cut: set[str] = field(default_factory=set)  # steps of which some batches were cut
    _warned: set[str] = field(default_factory=set)

    def _warn_once(self, name: str, reason: str) -> None:
        if name not in self._warned and torch.distributed.get_rank() == 0:
            warnings.warn(
                f"{name}: samples of a batch need one another from here on, as they did not at first: {reason}. Such "
                "batches are left whole (microbatches=1): slower.",
                stacklevel=2,
            )
        self._warned.add(name)

    _kinds: set[Any] = field(default_factory=set)  # of batches so far
    _fresh: Program | None = None
    _foreseen: Program | None = None
    _set_within: dict[int, tuple[Program, dict[str, Any]]] = field(default_factory=dict)
    _change = ""

    def prepare_apart(self, step: Step, microbatches: int) -> Prepared:
        """As `prepare`, with each microbatch a batch of its own, whose loss counts by its share of the samples."""
        samples = step.samples
        count = max(1, min(microbatches, samples))
        parts: list[Part] = []
        began = generators.global_state()
        for own in (Positions.even(samples, count).indices(i) for i in range(count)):
            low, high = int(own[0]), int(own[-1]) + 1

            def cut(x: Tensor, low: int = low, high: int = high) -> Tensor:
                return x[low:high] if x.ndim and x.shape[0] == samples else x

            (part,) = self.prepare(replace(step, batch=map_tensors(cut, step.batch)), 1).parts
            part.share, part.apart = len(own) / samples, count > 1
            parts.append(part)
        return Prepared(parts, began, generators.global_state(), coupled=len(parts) > 1)

    def _study(self, step: Step, microbatches: int, signature: Any, known: list[Program]) -> int:
        """Add a program to ``known``; returns the count of microbatches that it is for."""
        shapes = signature[:-1]
        if signature in self.refused or shapes in self.refused:
            return 1
        self.studies[shapes] = self.studies.get(shapes, 0) + 1
        if microbatches > 1 and self.studies[shapes] > MOST_STUDIES:
            self.refused[shapes] = "what modules do follows values that change from step to step"
            return 1
        program, mixed, axis = None, None, MicrobatchAxis(microbatches, 0)
        try:
            program = study(step, self.stages, microbatches, axis)
        except (SamplesMixError, UnitError) as error:
            if microbatches == 1:
                raise
            mixed = str(error)
        mixed = self.hooks.any_of(mixed, axis.tried)
        if mixed is not None or program is None:
            self.refused[signature] = str(mixed)
            if step.name in self._cut:
                self._warn_once(step.name, str(mixed))
            return 1
        if microbatches == 1 and self.studies[shapes] > MOST_STUDIES:
            program.leaves = False  # it is told something else at each step, which so far came to nothing
        self._add(step, program)
        self._fresh = program
        return microbatches

    def foresee(self, step: Step, program: Program) -> None:
        """``program`` was made of ``step`` when the module was whole: where the first batch is like that of ``step``,
        and a dry run agrees, it need not be studied again."""
        self._is_first(self._signature(step, program.microbatches))
        self._add(step, program)
        self._foreseen = program

    def _add(self, step: Step, program: Program) -> None:
        if program.microbatches > 1:
            self._cut.add(step.name)
        self.deciding |= program.deciding
        self._check_parameters(step, program)
        self.made.setdefault(self._signature(step, program.microbatches), []).insert(0, program)

    def _check_parameters(self, step: Step, program: Program) -> None:
        for name, stages in program.uses.items():
            for stage in stages if name not in self.stages.homes else ():
                holders = self.holds(name)
                if program.at[stage] not in holders:
                    raise ValueError(
                        f"{step.name} uses {name!r} on rank {program.at[stage]} of those that share the model, but it "
                        f"is held by rank {', '.join(map(str, holders))} alone, where training uses it. Use it in the "
                        "forward of the module that it belongs to, or place modules so that both meet."
                    )

    def _signature(self, step: Step, microbatches: int) -> Any:
        tensors = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in tensors_in(step.batch))
        with DisableTorchFunctionSubclass():  # weights of other stages would ask who reads
            trained = hash(tuple([p.requires_grad for _, p in self.tree.parameters()])) if step.grad else 0
        modes = hash(tuple([m.training for _, m in self.tree.modules()]))
        said = hash((self.attributes.changed_since(self.deciding), self._of_trainer())) if microbatches > 1 else 0
        return step.name, step.grad, microbatches, tensors, trained, modes, self.hooks.known, said

    def _is_first(self, signature: Any) -> bool:
        """Whether all ranks meet a batch of its kind for the first time; they alone may know of other reasons to study
        a step."""
        *alike, _, hooks, _ = signature  # modes of layers, and what is said of attributes, may go by the rank
        kind = (*alike, hooks, self.module.training)
        known = kind in self._kinds
        self._kinds.add(kind)
        return not known

    def _of_trainer(self) -> tuple[Any, ...]:
        trainer = trainer_of(self.module)
        values = [getattr(trainer, name, None) for name in sorted(self.deciding)]
        plain = tuple(value for value in values if isinstance(value, (bool, int, float, str)))
        if trainer is None or self.deciding.isdisjoint(("optimizers", "lr_scheduler_configs")):
            return plain
        return (*plain, numbers_of(trainer.optimizers))

    def _dry(self, step: Step, program: Program, start: tuple[Any, ...]) -> Prepared | None:
        memo = Memo(step.batch)
        rank, watch = self.hooks.axis.rank, self.watch
        tape = Tape(program, memo, rank, watch.moves, watch.original) if may_be_taped(program) else None
        run = DryRun(program, memo, tape)
        kept = [(x, x.detach().clone()) for x in tensors_in(step.batch)] if program.changes_batch else []
        try:
            self.watch.take_in(program.outer)
            with (
                self._apart(step, program),
                self.watch.undone(step.batch, keep=True, hear=tape),
                torch.set_grad_enabled(step.grad),
                step.context(),
            ):
                with run:
                    result = call_step(self.module, step)
                if tape is not None:
                    tape.end(result)
                self._see_what_is_set(program)
            run.finish()
            self._see_what_hooks_meet(step, program)
        except Exception as error:
            # Shapes of another step may well be what the user's code raises at; if not, it will when it is studied.
            if not isinstance(error, ChangedError) and program is self._fresh:
                raise
            self.attributes.changed_since(())  # some of it was undone
            self._change = str(error)
            with torch.no_grad():
                for x, was in kept:  # a step that writes into its batch must not do so twice
                    x.copy_(was)
            return None
        self._fresh = self._foreseen = None
        self.attributes.changed_since(())
        before, count = (start[2], start[3]), program.microbatches  # of numpy and of `random`
        memo.standing = before if is_standing(before) else None
        parts = [Part(step, program, memo, before)]
        if count > 1:
            axes = [MicrobatchAxis(count, i) for i in range(count)]
            # a loss that no sample goes into would count once for each microbatch
            shares = [1.0 if program.loss_is_share else share_of(program, axis) for axis in axes]
            told = tape if memo.standing is not None and not memo.anew else None
            pairs = zip(axes, shares, strict=True)
            parts = [Part(step, program, memo, before, axis, share, tape=told) for axis, share in pairs]
        return Prepared(parts, start, generators.global_state())

    def _see_what_hooks_meet(self, step: Step, program: Program) -> None:
        """Hooks on gradients run before what the step has changed is there, unless it has one microbatch.

        Raises:
            ChangedError: they may go by what it changed.
        """
        met = program.in_hooks & {name for name, _ in self.watch.made} if program.microbatches > 1 else None
        if met:
            place = f"{sorted(met)[0]}, which the step changes and a hook on a gradient may go by"
            self.refused[self._signature(step, program.microbatches)[:-1]] = place
            self._fresh = None
            raise ChangedError(place)

    @contextmanager
    def _apart(self, step: Step, program: Program) -> Iterator[None]:
        """Inside the step's own code runs, for the first time by ``program``, and no unit.

        Raises:
            ValueError: it changes what units hold that change it, too: no rank but theirs would have both.
        """
        units = sorted(program.keeping) if program in (self._fresh, self._foreseen) else []
        states = [(path, *self.watch.with_unit(path)) for path in units]
        for _, state, _ in states:
            state.lend_iterators()
        try:
            yield
        finally:
            for _, state, _ in states:
                state.settle_iterators()
        for path, state, own in states:
            changed = [name for name in sorted(own) if state.cells[name].change_unlent() is not None]
            if changed:
                state.restore()
                raise ValueError(
                    f"{step.name} changes {changed[0]} by other code than the forward of {path!r}, which changes "
                    "what it holds, too. That runs on the ranks that have its weights alone. Call it as a module, or "
                    "keep what is changed elsewhere in the LightningModule."
                )

    def _see_what_is_set(self, program: Program) -> None:
        """A step may set what units go by before it calls them.

        Raises:
            ChangedError: it set something else than when ``program`` was made.
        """
        found = dict(self.attributes.changed_since(self.deciding)) if program.microbatches > 1 else {}
        found |= {f"a hook on {name}": n for name, n in self.hooks.now()} if self.watch.hooks.moved() else {}
        _, known = self._set_within.setdefault(id(program), (program, found))
        if found != known:
            place = next(p for p in (*found, *known) if p not in found or p not in known or found[p] != known[p])
            raise ChangedError(f"{place}, which the step sets")


def call_step(module: nn.Module, step: Step) -> Any:
    return getattr(module, step.name)(step.batch, *step.rest)
