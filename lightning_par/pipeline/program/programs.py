"""The programs of a module's steps: which are known, which one a step has, and what a new one is made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.effects.user_hooks import Hooks
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.plan.no_schedule import NoScheduleError, UnscheduledError
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.program.lent_buffers import lacking_buffers
from lightning_par.pipeline.program.matching import Matching
from lightning_par.pipeline.program.prepared_step import Part, Prepared
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.program.update_calls import UpdateCall, joined_calls
from lightning_par.pipeline.run.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.pipeline.trial.code_attributes import TENSORS, Attributes, flags_among
from lightning_par.pipeline.trial.study import study
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.modules import ModuleTree
from lightning_par.python_state import generators
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.python_state.referents import all_tensors_in
from lightning_par.python_state.tensor_classes import class_of, of_its_class, plain
from lightning_par.sharded.run_state import RunState
from lightning_par.trial.step import Step
from lightning_par.trial.trainer_stand_ins import numbers_of

_second, _requires_grad, _training = itemgetter(1), attrgetter("requires_grad"), attrgetter("training")

_ALIKE = "Let all ranks do the same in a step."
MOST_STUDIES = 12  # of batches of one shape, for what modules and trainer say, before they are left whole
MOST_PROGRAMS = 32  # of one signature, of which a step takes one or another


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
    unscheduled: dict[Any, str] = field(default_factory=dict)
    studies: dict[Any, int] = field(default_factory=dict)
    deciding: set[str] = field(default_factory=set)
    _kinds: set[Any] = field(default_factory=set)  # of batches so far
    _cut: set[str] = field(default_factory=set)  # steps of which some batches were cut
    _warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.attributes = Attributes(self.module, self.stages.homes)
        self.tree = ModuleTree(self.module)
        self._matching = Matching(self.module, self.watch, self.hooks, self.attributes, self._refuse)

    @property
    def reads_gradients(self) -> bool:
        """Whether the code of a step looks at gradients, as far as known."""
        return any(program.reads_gradients for known in self.made.values() for program in known)

    def read_in_backward(self, names: list[str]) -> list[str]:
        """Those of the weights of these names that the backward of a step may read, as far as known."""
        programs = (program for known in self.made.values() for program in known)
        found = {name for p in programs if p.backward_reads is not None for name in p.backward_reads.among(names)}
        return [name for name in names if name in found]

    def prepare(self, step: Step, microbatches: int) -> Prepared:
        """Find the program of ``step``, made before or made now, and compute what depends on the batch alone.

        Raises:
            UnscheduledError: there is none.
        """
        samples = step.samples
        if not samples and tensors_in(step.batch):
            raise ValueError(f"{step.name}: the batch is empty: its first tensor has {samples} samples.")
        wanted = max(1, min(microbatches, samples))  # so that no microbatch is empty
        self.hooks.agree()
        self.watch.begin()
        self._hear()
        signature = self._signature(step, wanted)
        first, tried = self._is_first(signature), replace(step, lent=self.attributes.tensors.lent)
        while True:
            known = self.made.setdefault(signature, [])
            start = generators.global_state()
            for program in known:
                ready = self._matching.prepared(step, program, start, self.deciding)
                if ready is not None:
                    self.made.setdefault(self._signature(step, wanted), known)  # which it may have changed
                    known.remove(program)  # to the front: the next step is likely to be the same
                    known.insert(0, program)
                    return ready
                generators.set_global_state(start)
            del known[MOST_PROGRAMS:]
            if known and known[0] is self._matching.fresh:  # it was made of this very step
                raise RuntimeError(
                    f"{step.name} does something else each time it runs, first at {self._matching.change}. "
                    f"{self.stages.ranks} ranks that share the model can't follow that: what a step does must depend "
                    "on the batch, the module's attributes and random numbers of torch, numpy or `random` alone. What "
                    "goes by gradients or by an optimizer's state, or makes parameters, is for hooks between steps, as "
                    "on_train_batch_start."
                )
            if first:  # on all ranks: what a layer does may go by buffers that one of them holds
                self.hooks.meeting("met a kind of batch for the first time", "Give all ranks the same batches.")
                first, tried = False, replace(step, lent=lacking_buffers(self.module, self.hooks.axis))
            wanted = self._study(tried, wanted, signature)
            signature = self._signature(step, wanted)

    @property
    def _goes_by_contents(self) -> bool:
        """Whether layers decide by what small tensors hold, of which ranks have their own."""
        return TENSORS in self.deciding and self.attributes.tensors.tell

    def _hear(self) -> None:
        """All ranks learn what these tensors hold."""
        if self._goes_by_contents:
            self.hooks.meeting.at_any_time("came to a step with layers that decide by values of tensors", _ALIKE)
            self.attributes.hear(self.hooks.axis.all_gather_object(self.attributes.tensors.told(), "buffers"))

    def _warn_once(self, name: str, reason: str) -> None:
        if name not in self._warned and torch.distributed.get_rank() == 0:
            warnings.warn(
                f"{name}: samples of a batch need one another from here on, as they did not at first: {reason}. Such "
                "batches are left whole (microbatches=1): slower.",
                stacklevel=2,
            )
        self._warned.add(name)

    def prepare_apart(self, step: Step, microbatches: int) -> Prepared:
        """As `prepare`, with each microbatch a batch of its own, whose loss counts by its share of the samples."""
        samples = step.samples
        count = max(1, min(microbatches, samples))
        parts: list[Part] = []
        updates: list[Sequence[UpdateCall]] = []
        began = generators.global_state()
        for own in (Positions.even(samples, count).indices(i) for i in range(count)):
            low, high = int(own[0]), int(own[-1]) + 1

            def cut(x: Tensor, low: int = low, high: int = high) -> Tensor:
                return of_its_class(x, plain(x)[low:high]) if x.ndim and x.shape[0] == samples else x

            ready = self.prepare(replace(step, batch=map_tensors(cut, step.batch)), 1)
            (part,) = ready.parts
            updates.append(ready.updates)
            part.share, part.apart = len(own) / samples, count > 1
            parts.append(part)
        coupled, together = len(parts) > 1, joined_calls(updates)
        return Prepared(parts, began, generators.global_state(), coupled=coupled, updates=together)

    def _study(self, step: Step, microbatches: int, signature: Any) -> int:
        """Add a program to those that were made; returns the count of microbatches that it is for."""
        shapes = signature[:-1]
        if signature in self.unscheduled:
            raise UnscheduledError(self.unscheduled[signature])
        if signature in self.refused or shapes in self.refused:
            return 1
        self.studies[shapes] = self.studies.get(shapes, 0) + 1
        if microbatches > 1 and self.studies[shapes] > MOST_STUDIES:
            self.refused[shapes] = "what modules do follows values that change from step to step"
            return 1
        program, mixed, axis = None, None, MicrobatchAxis(microbatches, 0)
        try:
            program = study(step, self.stages, microbatches, axis)
        except (SamplesMixError, NoScheduleError) as error:
            if microbatches == 1:
                if isinstance(error, SamplesMixError) or not error.by_units:
                    raise
                self.unscheduled[signature] = str(error)
                raise UnscheduledError(str(error)) from error
            mixed = str(error)
        if self._goes_by_contents:
            self.hooks.meeting.at_any_time("studied a step anew", _ALIKE)
        mixed = self.hooks.any_of(mixed, axis.tried or self._goes_by_contents)
        if mixed is not None or program is None:
            self.refused[signature] = str(mixed)
            if step.name in self._cut:
                self._warn_once(step.name, str(mixed))
            return 1
        if microbatches == 1 and self.studies[shapes] > MOST_STUDIES:
            program.leaves = False  # it is told something else at each step, which so far came to nothing
        self._add(step, program)
        self._matching.fresh = program
        return microbatches

    def foresee(self, step: Step, program: Program) -> None:
        """``program`` was made of ``step`` when the module was whole: where the first batch is like that of ``step``,
        and a dry run agrees, it need not be studied again."""
        self._is_first(self._signature(step, program.microbatches))
        self._add(step, program)
        self._matching.foreseen = program

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
                    raise UnscheduledError(
                        f"{step.name} uses {name!r} on rank {program.at[stage]} of those that share the model, but it "
                        f"is held by rank {', '.join(map(str, holders))} alone, by the steps that came "
                        "first. Use it in the forward of the module that it belongs to, or place modules so that both "
                        "meet."
                    )

    def _refuse(self, step: Step, program: Program, reason: str) -> None:
        self.refused[self._signature(step, program.microbatches)[:-1]] = reason

    def _signature(self, step: Step, microbatches: int) -> Any:
        held = tensors_in(step.batch)
        known = {*map(id, held)}
        # in objects of any class, too, as the graphs of torch_geometric are; a set has no order that ranks share
        others = sorted(map(_form, (x for x in all_tensors_in(step.batch) if id(x) not in known)), key=repr)
        tensors = (*map(_form, held), *others)
        with DisableTorchFunctionSubclass():  # weights of other stages would ask who reads
            trained = hash(tuple(map(_requires_grad, map(_second, self.tree.parameters())))) if step.grad else 0
        modes = hash(tuple(map(_training, map(_second, self.tree.modules()))))
        if RunState.current.streams.whole:
            modes = hash((modes, *self._which_numbers_are_zero()))
        shapes = step.name, step.grad, microbatches, tensors, trained, modes, self.hooks.known
        numbers = microbatches > 1 or self.studies.get(shapes, 0) <= MOST_STUDIES
        return *shapes, self._said(numbers) if microbatches > 1 or step.grad else 0

    def _which_numbers_are_zero(self) -> Iterator[bool]:
        """Of torch's modules: a dropout of rate 0 draws nothing, and where one device draws on goes by that."""
        for _, module in self.tree.modules():
            if type(module).__module__.startswith("torch."):
                yield from (value == 0 for value in vars(module).values() if type(value) in (int, float))

    def _said(self, numbers: bool) -> int:
        """Of what attributes and the trainer say to units: of a batch that is not cut, too, they may decide to which
        values a gradient comes. That by flags alone, where ``numbers`` have said something else all the time."""
        said = (*self.attributes.changed_since(self.deciding), *enumerate(self._of_trainer()))
        return hash(said if numbers else flags_among(said))

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


def _form(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.requires_grad, class_of(x)
