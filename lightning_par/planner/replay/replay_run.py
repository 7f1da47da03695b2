"""The recorded functions of a step, run again by their rules on fakes, as one rank runs them in each stage."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.ledger import ledger
from lightning_par.pipeline.run.backward import SplitBackward, backward, with_zeros
from lightning_par.planner.memory.stage_trace import StageTrace, Taken, TraceRecorder
from lightning_par.planner.recording.recorded import RecordedStep, casting
from lightning_par.planner.recording.run_again import parts_of
from lightning_par.planner.recording.stages import StageCut
from lightning_par.planner.replay.counting_axis import CountingAxis, CountingResidual, CountingSequence
from lightning_par.planner.replay.crossing_values import handed_on, leaving, nbytes, received
from lightning_par.planner.replay.gathered_blocks import GatheredAgain, GatheredBlocks
from lightning_par.planner.replay.place import Place
from lightning_par.planner.replay.rank_values import tokens_of, weights_of
from lightning_par.planner.replay.regions import run_again
from lightning_par.planner.replay.stage_replay import RETURNED, TAKEN, StageReplay
from lightning_par.planner.replay.storage import Storage, store
from lightning_par.planner.replay.untold import untold
from lightning_par.planner.replay.weight_leaves import copy_weights, looks, summed_up
from lightning_par.private.fake_tensors import unset_fake_temporarily
from lightning_par.private.graph import made_by
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.storage import memory_of
from lightning_par.sequence.batch_tensor import BatchTensor
from lightning_par.sequence.plan import SequencePlan, asks, asks_in_parts
from lightning_par.sharded.aliases.frames import innermost
from lightning_par.sharded.gradient_shares import unshared
from lightning_par.sharded.rules.lookup import dispatch
from lightning_par.sharded.rules.several_axes import Mix
from lightning_par.sharded.tensor import ShardedTensor, full
from lightning_par.tensor.plan import Dealt
from lightning_par.trial.applied_functions import Applied
from lightning_par.trial.fake_functions import is_fake, run_on_fakes
from lightning_par.trial.recording import Event, returned


class ReplayRun:
    """One run of the stages, forward and backward, whose values a stage leaves to the next.

    Args:
        step: as recorded.
        dealt: the islands of the tensor axis.
        place: the rank.
        storage: parameters that are stored in parts; None: none is.
        given: how the batch is given to ranks that share out tokens; None: they don't.
        cut: into stages; None: it is not.
        lengths: of tokens that earlier runs have met.
    """

    def __init__(
        self, step: RecordedStep, dealt: Dealt, place: Place, storage: Storage | None, given: SequencePlan | None,
        cut: StageCut | None = None, lengths: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.step, self.place, self.cut = step, place, cut
        self.calls = {call.first: call for call in step.whole_calls}
        self.apart = frozenset(() if cut is None else (call.event for call in cut.updates))  # of no stage
        self.tensor = CountingAxis(*place.tensor)
        self.tokens: Any = None
        if place.sequence[0] > 1:
            self.tokens = CountingSequence(*place.sequence)
            self.tokens.attend(place.attention)
        elif place.residual:
            self.tensor.gradient_shares = True
            self.tokens = self.tensor.residual = CountingResidual(self.tensor, lengths)
        self.axes: tuple[Axis, ...] = tuple(x for x in (self.tokens, self.tensor) if x is not None and x.size > 1)
        self.mix = Mix(self.axes) if len(self.axes) > 1 else None
        self.values: dict[int, Any] = {}
        self.last: dict[int, list[int]] = defaultdict(list)
        ends = {id(x) for x in tree_leaves(step.recording.result) if isinstance(x, Tensor)}
        ends |= {id(end.value) for end in step.recording.ends}
        # by variables of the user's code, which stages don't run as written
        held = step.held_until if cut is not None and cut.count == 1 else {}
        told: Collection[int] = () if cut is None else cut.told
        for x, _, last in step.lives:
            if id(x) not in ends and id(x) not in told:
                self.last[max(last, held.get(id(x), last))].append(id(x))
        self.fake: Any = next(x for x in step.recording.parameters.values()).fake_mode  # type: ignore[attr-defined]
        self.values |= weights_of(step, dealt, self.tensor, self.fake)
        self.parts: dict[int, Tensor] = {}  # of parameters that are stored in parts, by their ids
        self.blocks: GatheredBlocks | None = None
        if storage is not None:
            self.blocks = store(storage, step, self.values, self.parts, self.tensor.rank, self.fake)
        self.gathers: GatheredBlocks | GatheredAgain | None = self.blocks
        self.is_second = False  # whether it runs a region again, which has run before
        self.asked: list[bool] = []  # of each call of attention, whether it is for this rank's own tokens alone
        if self.tokens is not None and given is not None:
            self.values |= tokens_of(step, given, self.tokens)

    def stage(self, number: int, first: int, end: int) -> StageReplay:
        """Of the stage ``number``, the events from ``first`` to ``end``, forward and backward."""
        made: set[int] = set()
        leaves: dict[str, Tensor] = {}
        used = {id(x) for event in self.step.events[first:end] for x in event.inputs}
        for names, x in self.step.recording.parameters.items():
            if id(x) not in used:  # another stage's, of which a large model has many
                continue
            leaf = leaves[names[0]] = self.parts[id(x)] if id(x) in self.parts else innermost(self.values[id(x)])
            # what backward makes of it is added to what is there
            leaf.grad = torch.empty_like(leaf) if leaf.requires_grad else None
            summed_up(leaf)
            if names[0] in self.step.hooked and names[0] in self.place.looked_at:
                leaf.register_hook(looks)
        taken = self._taken(number)
        here = [innermost(self.values.get(id(x), x)) for x in taken]
        arrived = [inner for x, inner in zip(taken, here)
                   if id(x) in self.values and inner.requires_grad and made_by(inner) is None]  # fmt: skip
        came = {id(x): self.values[id(x)] for x in taken if id(x) in self.values}
        self.values |= {key: received(x) for key, x in came.items()}
        recorder = TraceRecorder(leaves) if self.place.live else None

        def counted(op: str) -> Any:
            return nullcontext() if recorder is None else recorder.action(op)

        shares = number in self.place.shared
        with ledger() as moved, torch.autocast("cpu", enabled=False) if shares else nullcontext():
            if shares:
                copy_weights([*leaves.values()], self.step.autocast)
            with counted("F"), casting(self.step.autocast):
                self._forward(made, first, end)
                leave = [x for x in self._taken(number + 1) if id(x) in made and id(x) in self.step.of_model]
                for x in leave:
                    self.values[id(x)] = leaving(self.values[id(x)], self.tensor, self._goes_back(x, end))
            roots, grads, after = self._ends(made, leave)
            if self.blocks is not None:
                after = {}  # nothing follows: there is one stage
            after |= {key: x for key, x in came.items() if key in self.values}  # which only pass through
            held = self._backward(roots, grads, arrived, after, counted)
        grows: Mapping[int, float] = {} if self.cut is None else self.cut.grows
        sizes = [round(nbytes(y) * grows.get(id(x), 1)) for x, y in zip(taken, here)]
        values = tuple(Taken(size, x.requires_grad, held.get(id(y), 0)) for size, x, y in zip(sizes, taken, here))
        found = {"sequence": 0.0, "tensor": 0.0, TAKEN: float(sum(x.nbytes for x in values))}
        found[RETURNED] = float(sum(x.nbytes for x in values if x.wanted))
        for transfer in moved.transfers:
            found[transfer.axis] = found.get(transfer.axis, 0.0) + transfer.sent
        return StageReplay(found, None if recorder is None else StageTrace(recorder.actions, values))

    def attends(self) -> tuple[int, int]:
        """How many calls of attention in a forward are for this rank's own tokens alone, and how many there are."""
        with casting(self.step.autocast):
            self._forward(set(), 0, len(self.step.events))
        return sum(self.asked), len(self.asked)

    def _forward(self, made: set[int], first: int, end: int) -> None:
        blocks = self.blocks
        with nullcontext() if blocks is None else blocks.saved():
            self._run_events(made, first, end)
            for key in () if blocks is None else blocks.end_forward():
                self.values.pop(key, None)

    def _run_events(self, made: set[int], first: int, end: int) -> None:
        """The events from ``first`` to ``end``; those that the module itself has backward run again so that it does."""
        parts = parts_of(self.step, self.cut, (first, end), self.place.cuts, self.place.residual)
        for (begin, behind), region in parts:
            if region is None:
                self.run_plainly(made, begin, behind)
            else:
                run_again(self, region, made, begin, behind)

    def run_plainly(self, made: set[int], first: int, end: int) -> None:
        """The events from ``first`` to ``end``, one after the other; what they make is noted in ``made``."""
        number = first
        while number < end:
            call = self._call(number, end)
            numbers = range(number, number + 1 if call is None else call.end)
            with torch.set_grad_enabled(self.step.events[number].graph if call is None else call.graph):
                for inside in numbers if self.gathers is not None else ():
                    self.values |= self.gathers.before(inside)  # type: ignore[union-attr]
            if call is None:
                self._run_event(made, number)
            else:
                self._apply(made, call)
            for inside in numbers if self.gathers is not None else ():
                for key in self.gathers.after(inside):  # type: ignore[union-attr]
                    self.values.pop(key, None)
            number = numbers.stop

    def _call(self, number: int, end: int) -> Applied | None:
        """What runs as one from the event ``number`` on, before ``end``: it takes something of the model."""
        call = self.calls.get(number)
        if call is None or call.end > end or all(id(x) not in self.values for x in tree_leaves(call.args)):
            return None
        return call

    def _apply(self, made: set[int], call: Applied) -> None:
        """A call of an autograd function of the user's, as a run has it."""
        grads = call.graph and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(call.result))
        with torch.set_grad_enabled(grads):
            result = call.function.apply(*tree_map(self._value, call.args))
        self._note_made(made, tree_leaves(call.result), result)
        del result
        for number in range(call.first, call.end):
            self._let_go(number)

    def _note_made(self, made: set[int], olds: Sequence[Any], result: Any) -> None:
        new = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for old, value in zip((x for x in olds if isinstance(x, Tensor)), new, strict=False):
            self.values[id(old)] = value
            made.add(id(old))

    def _run_event(self, made: set[int], number: int) -> None:
        event = self.step.events[number]
        # what takes nothing of the model or of a split batch sends nothing; what makes no tensor reads one
        if all(id(x) not in self.values for x in event.inputs):
            return
        if event.func is returned:  # which leaves the step whole
            with torch.no_grad():
                for x in event.inputs:
                    full(self.values.get(id(x), x))
            return
        if event.name == "register_hook":
            self._look_at(event.args[0])
        if not event.outputs:
            return
        if number in self.apart:
            return
        args, kwargs = tree_map(self._value, (event.args, event.kwargs))
        asked = asks(event)
        if asked is not None:
            self.asked.append(asks_in_parts(self._value(asked)))
        with contextlib.ExitStack() as stack:
            if not event.graph or not any(x.requires_grad for x in event.outputs):
                stack.enter_context(torch.no_grad())
            try:
                result = self._run(event, args, kwargs)
            except Exception as error:  # whatever functions and rules raise of tensors without values
                if self.is_second:
                    raise  # as what ends the second run of a region
                raise untold(event, error) from error
        self._note_made(made, event.outputs, result)
        del args, kwargs, result, asked
        self._let_go(number)

    def _look_at(self, x: Tensor) -> None:
        """Hang a hook where the step hangs one."""
        names, value = self.step.names.get(id(x)), self._value(x)
        if value.requires_grad and (names is None or names[0] in self.place.looked_at):
            value.register_hook(looks)

    def _let_go(self, number: int) -> None:
        """Of what the event ``number`` was the last to take, all but the loss."""
        for key in self.last.pop(number, ()):
            self.values.pop(key, None)

    def _run(self, event: Event, args: Any, kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(x, BatchTensor) for x in leaves):
            return event.func(*args, **kwargs)  # what the batch alone determines is computed whole
        sharded = any(isinstance(x, ShardedTensor) for x in leaves)
        if not any(isinstance(x, Tensor) and is_fake(x) for x in leaves):  # sizes that the batch alone tells
            with unset_fake_temporarily():
                return event.func(*args, **kwargs)
        if sharded:
            return dispatch(event.func, args, kwargs)
        return run_on_fakes(self.fake, event.func, args, kwargs)[0]

    def _taken(self, number: int) -> tuple[Tensor, ...]:
        """What the stage ``number`` takes of the one before it."""
        return () if self.cut is None or number >= self.cut.count else self.cut.crossing[number]

    def _goes_back(self, x: Tensor, first: int) -> bool:
        """Whether a gradient of ``x`` comes back from the stages that begin with the event ``first``."""
        return self.step.last_needed.get(id(x), -1) >= first

    def _ends(self, made: set[int], outs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], dict[int, Any]]:
        """What backward begins with, its gradients, and what is handed on, which the next stage begins with anew: what
        this one began with holds the whole graph."""
        recording = self.step.recording
        last = (*tree_leaves(recording.result), *(one.value for one in recording.ends))
        loss = [x for x in last if isinstance(x, Tensor) and id(x) in made]
        ends: dict[int, Tensor] = {}
        for x in (*outs, *loss):
            inner = innermost(self.values[id(x)])
            if inner.requires_grad and made_by(inner) is not None:
                ends[id(inner)] = inner
        roots = [*ends.values()]
        after = {id(x): handed_on(self.values[id(x)]) for x in (*outs, *loss)}
        return roots, [torch.empty_like(x) for x in roots], after

    def _backward(
        self, roots: list[Tensor], grads: list[Tensor], inputs: list[Tensor], after: dict[int, Any], counted: Any
    ) -> dict[int, int]:
        """Bytes that gradients of ``inputs`` hold, by these' ids; see `Taken`."""
        # a pipeline's engine begins with shares itself
        with unshared() if self.cut is not None and self.cut.count > 1 else nullcontext():
            split = SplitBackward() if self.place.split else None
            with counted("B" if split is None else "I"):
                found = with_zeros((backward if split is None else split.inputs)(roots, grads, inputs), inputs)
                memories = {memory_of(x): (id(y), x.untyped_storage().nbytes()) for x, y in zip(found, inputs)}
                del found
                self.values |= after
                roots.clear()
            if split is not None:
                with counted("W"):
                    split.weights()
        return dict(memories.values())

    def _value(self, x: Any) -> Any:
        return self.values.get(id(x), x.detach() if x.requires_grad else x) if isinstance(x, Tensor) else x
