"""What one rank holds and sends, exactly: parameters, gradients, the optimizer's state, bytes by axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from lightning_par.planner.messages.averages import averages
from lightning_par.planner.messages.block_gathers import gatherings, in_vain
from lightning_par.planner.messages.clipped import norm_sums
from lightning_par.planner.messages.dried import RankPlace, SentAt
from lightning_par.planner.messages.stored_parts import StoredPart, StoredSum, block_messages, stored_part, stored_sum
from lightning_par.planner.prediction import HeldBytes
from lightning_par.planner.recording.profile import Parameter
from lightning_par.planner.recording.updates import WeightMessage, messages_of
from lightning_par.planner.recording.uses import StageUses, Use
from lightning_par.planner.replay.stage_replay import RETURNED, TAKEN, StageReplay
from lightning_par.planner.times.layout_work import LayoutWork

LOSS_BYTES = 4

Sender = Callable[[int, int], tuple[StageReplay, ...]]
"""What one microbatch is to a rank in each stage, by its indices along the tensor and sequence axes."""


@dataclass(eq=False)
class ByRank:
    """What each rank of a layout holds, and sends in a step of the optimizer.

    Args:
        work: of the layout.
        sender: what ranks send along the tensor and sequence axes.
        dried: what dry runs say that they send in all, where formulas don't.

    Example::

        by_rank.held(pipeline=0, tensor=0, replica=0).parameters
    """

    work: LayoutWork
    sender: Sender
    dried: SentAt = lambda *place: None
    _held: dict[tuple[int, int, int], HeldBytes] = field(default_factory=dict)
    _sent: dict[tuple[int, int, int], dict[str, float]] = field(default_factory=dict)

    def held(self, pipeline: int, tensor: int, replica: int) -> HeldBytes:
        """Of the rank with these coordinates; ``replica`` counts ranks along data and sequence."""
        key = pipeline, tensor, replica
        if key not in self._held:
            p, one, size = self.work.run.precision, self.work.one, self.work.replicas.size
            own = tuple(self._own(pipeline))
            total = stored_sum(self.work.profile.stages, own, tensor, size, replica, one.stored)
            states = self._states(key, total)
            self._held[key] = HeldBytes(total.numel * p.weights, total.trained * p.gradients, states)
        return self._held[key]

    def _states(self, key: RankPlace, total: StoredSum) -> float:
        """Of the optimizer."""
        (_, tensor, replica), work, p = key, self.work, self.work.run.precision
        states, shaped, found = work.run.optimizer, work.run.optimizer.shaped, 0.0
        if not states.others and not shaped.optimizers:
            return total.trained * states.most.by_element * p.weights / 4 + states.most.by_parameter * total.count
        ranks = work.replicas.size if work.one.stored else 1
        for part in self._parts(*key):
            name = part.parameter.name
            if part.parameter.graded and name in shaped.optimizers:
                found += shaped.nbytes(part.parameter, p.stepped, tensor, ranks, replica)
            elif part.parameter.graded:
                each = states.others.get(name, states.most)
                found += part.numel * each.by_element * p.weights / 4 + each.by_parameter
        return found

    def sent(self, pipeline: int, tensor: int, replica: int) -> dict[str, float]:
        """Bytes by axis, of the rank with these coordinates."""
        key = pipeline, tensor, replica
        if key not in self._sent:
            found = self.dried(*key)
            if found is None:
                reckoned = self._reckoned(key)
                found = self.dried(*key)  # which the rules may have shown to be needed
                found = reckoned if found is None else found
            self._sent[key] = dict(found)
        return self._sent[key]

    def _reckoned(self, key: RankPlace) -> dict[str, float]:
        """By formulas."""
        pipeline, tensor, replica = key
        own = self._own(pipeline)
        crosses = self.work.one.layout.pipeline > 1
        found = {
            "data": self._gathered(own, self._parts(*key)) + self._looked_at(self._parts(*key)),
            "pipeline": self._pipeline(own, tensor, replica) if crosses else 0.0,
            **self._activations(own, tensor, replica),
        }
        for axis, size in self._updates(pipeline).items():
            found[axis] += size
        for axis, size in averages(self.work, self._parts(*key)).items():
            found[axis] += size
        for x in norm_sums(self.work, pipeline):
            found[x.axis] += x.sent
        return found

    def most_sent_outside(self) -> dict[str, float]:
        """Of `most_sent`, what leaves a host, on average over a host's ranks."""
        return {axis: size * self.work.outside[axis] for axis, size in self.most_sent().items()}

    def most_sent(self) -> dict[str, float]:
        """Of the rank that sends most along each axis."""
        all_ = [self.sent(pipeline, 0, 0) for pipeline in range(self.work.one.layout.pipeline)]
        return {axis: max(sent[axis] for sent in all_) for axis in all_[0]}

    def _own(self, pipeline: int) -> list[int]:
        one = self.work.one
        return self.work.profile.stages.by_rank(one.schedule, one.layout.pipeline)[pipeline]

    def _parts(self, pipeline: int, tensor: int, replica: int) -> list[StoredPart]:
        held = self.work.profile.stages.held(self._own(pipeline))
        return [stored_part(x, tensor, self.work.replicas.size, replica, self.work.one.stored) for x in held]

    def _activations(self, own: Sequence[int], tensor: int, replica: int) -> dict[str, float]:
        one = self.work.one
        if one.layout.tensor * one.layout.sequence == 1:
            return {"sequence": 0.0, "tensor": 0.0}
        stages = self.sender(tensor, replica % one.layout.sequence)
        times = one.microbatches * one.accumulated
        found = {axis: sum(stages[s].sent[axis] for s in own) * times for axis in ("sequence", "tensor")}
        again = [self.work.units[u].again_sent for s in own for u in self.work.profile.stages.units[s]]
        found["tensor"] += sum(again) * times  # what backward computes again is not in the recorded step
        if one.layout.pipeline > 1:
            # Each rank begins backward with its share of the loss's gradient, of which a hook is told the sum.
            for axis, size, shares in (
                ("sequence", one.layout.sequence, True),
                ("tensor", one.layout.tensor, one.shard_residual),
            ):
                looked_at = LOSS_BYTES + self._met_by_hooks(own, axis, tensor)
                found[axis] += 2 * looked_at * (size - 1) / size * one.accumulated * shares
        return found

    def _met_by_hooks(self, own: Sequence[int], axis: str, tensor: int) -> float:
        """Of gradients of the stages' weights what the user's hooks meet summed over ``axis``, as each is delivered."""
        names, bytes_each = self.work.run.tree.hooked, self.work.run.precision.gradients
        held, (one, ranks) = self.work.profile.stages.held(own), (self.work.one, self.work.replicas.size)
        met = (x for x in held if x.name in names and x.trained and not stored_part(x, 0, ranks, 0, one.stored).message)
        return sum(prod(x.part(tensor)) * bytes_each for x in met if axis == "sequence" or x.dim is None)

    def _pipeline(self, own: Sequence[int], tensor: int, replica: int) -> float:
        """Values to the stages behind, gradients to those before, on other ranks; and gradients of tied weights."""
        work, one = self.work, self.work.one
        stages = work.profile.stages
        times = one.microbatches * one.accumulated
        crossing = self.sender(tensor, replica % one.layout.sequence)
        there = sum(crossing[s + 1].sent[TAKEN] for s in own if s + 1 < len(stages.units) and s + 1 not in own)
        back = sum(crossing[s].sent[RETURNED] for s in own if s and s - 1 not in own)
        return (there + back) * times + self._tied(own, tensor, replica) * one.accumulated

    def _updates(self, pipeline: int) -> dict[str, float]:
        """What travels of weights where the step updates some by others: one that a tensor axis splits is gathered."""
        one = self.work.one
        split = {x.name for x in self.work.profile.stages.held(self._own(pipeline)) if x.dim is not None}
        own = [x for x in self._weight_messages if x.source == pipeline and x.of in split]
        share = (one.layout.tensor - 1) / one.layout.tensor
        return {
            "pipeline": sum(x.nbytes for x in self._weight_messages) * one.accumulated,
            "tensor": sum(x.nbytes for x in own) * share * one.accumulated,
        }

    @cached_property
    def _weight_messages(self) -> list[WeightMessage]:
        stages, one = self.work.profile.stages, self.work.one
        by_rank = stages.by_rank(one.schedule, one.layout.pipeline)
        holders: dict[str, frozenset[int]] = {}
        for rank, own in enumerate(by_rank if stages.updates else ()):
            holders.update((x.name, holders.get(x.name, frozenset()) | {rank}) for x in stages.held(own))
        return messages_of(stages.updates, holders, len(by_rank))

    def _tied(self, own: Sequence[int], tensor: int, replica: int) -> float:
        """The sum of gradients over the ranks that hold the same parameters, and a flag for each."""
        each, one, size = self.work.run.precision.gradients, self.work.one, self.work.replicas.size
        # those of weights that are gathered for a call at a time are parts by then
        in_parts = one.stored and one.reshard
        parts = ((stored_part(x, tensor, size, replica, in_parts).numel, holders) for x, holders in self.tied(own))
        return sum(2 * (numel + 1) * each * (holders - 1) / holders for numel, holders in parts)

    def tied(self, own: Sequence[int]) -> list[tuple[Parameter, int]]:
        """The trained parameters of the stages ``own`` that other ranks hold, too, and how many ranks do."""
        stages, one = self.work.profile.stages, self.work.one
        held = [{x.name for x in stages.held(other)} for other in stages.by_rank(one.schedule, one.layout.pipeline)]
        counted = ((x, sum(x.name in names for names in held)) for x in stages.held(own) if x.trained)
        return [(x, holders) for x, holders in counted if holders > 1]

    def _gathered(self, own: Sequence[int], parts: Sequence[StoredPart]) -> float:
        """Of weights that are stored in parts, and of their gradients."""
        one, p, others = self.work.one, self.work.run.precision, self.work.replicas.size - 1
        stored = [part for part in parts if part.message]
        if not stored:
            return 0.0
        if one.layout.pipeline > 1 and not one.reshard:
            uses = self.work.run.tree.uses
            summed = sum(x.message for x in stored if x.parameter.trained and x.parameter.name in uses)
            moved = sum(x.message * p.moved(x.parameter.low) for x in stored) + summed * p.gradients
            return moved * others * one.accumulated
        by_stage = sum(self._by_blocks(self.work.profile.stages.uses[stage], parts) for stage in own)
        return by_stage * others * one.accumulated

    def _looked_at(self, parts: Sequence[StoredPart]) -> float:
        """Of gradients in parts that hooks of the user's meet: each is taken to compute with the whole one, once."""
        hooks, p, one = self.work.run.tree.hooked, self.work.run.precision, self.work.one
        met = (x for x in parts if x.message and x.parameter.trained and x.parameter.name in hooks)
        ranks = ((x, self.work.replicas.size * (one.layout.tensor if x.parameter.dim is not None else 1)) for x in met)
        return sum(hooks[x.parameter.name] * x.message * (n - 1) * p.gradients for x, n in ranks) * one.accumulated

    def _by_blocks(self, stage: StageUses, parts: Sequence[StoredPart]) -> float:
        """Bytes to each of the other ranks in a stage's forwards and backwards of a training step."""
        p, reshard, tree = self.work.run.precision, self.work.one.reshard, self.work.run.tree
        times = self.work.one.microbatches
        called = self.work.profile.stages.called
        blocks, alone = block_messages(tree.module, parts, called)
        last = None
        if not called:  # else another microbatch comes between a forward and its backward
            passing = [block for block in blocks if not block.stays]
            last = max(passing, key=lambda block: tree.last_call(block.paths[0]), default=None)
        known, sent = {part.parameter.name: part for part in parts}, 0.0
        for block in blocks:
            for name in block.names:
                outside = [use for use in stage.uses.get(name, ()) if not block.has(use.path)]
                sent += self._by_use(known[name], outside)
            for one in gatherings(block, tree, stage, reshard, block is last):
                on = [known[x].message for x in block.names if known[x].parameter.trained and x not in one.off]
                sent += one.gathers * block.gathered(p.moved(), p.moved(False)) * times
                sent += sum(known[x].message * p.moved(known[x].parameter.low) for x in one.alone) * times
                sent += one.sums * (sum(on) + len(on) * (len(on) > 1)) * p.gradients * times
        for part in alone:
            sent += self._by_use(part, stage.uses.get(part.parameter.name, ()))
        return sent + sum(block.gathered(p.moved(), p.moved(False)) for block in in_vain(blocks, tree, reshard))

    def _by_use(self, part: StoredPart, uses: Sequence[Use]) -> float:
        """Bytes to each of the other ranks of what is gathered for each of ``uses``, or all up to a backward."""
        p, trained, times = self.work.run.precision, part.parameter.trained, self.work.one.microbatches
        if self.work.one.reshard:
            # what the step itself uses stays, as no call of a module ends with it: for all of its microbatches
            gathers = sum((1 + len(use.needed) + use.asked) * (times if use.call else 1) for use in uses)
            sums = sum(len(use.summed) for use in uses) * times
        else:
            gathers = len({use.after for use in uses})
            sums = len({(use.after, number) for use in uses for number in use.summed})
        return part.message * (p.moved(part.parameter.low) * gathers + sums * p.gradients * trained)
