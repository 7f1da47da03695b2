"""Gradients of what a unit returns outside of a step: all ranks have one graph, of which the unit is a node.

User code between steps makes the same graph on all ranks, but for the insides of units, which the ranks have that hold
their weights. So a unit's result comes out of one autograd function. Its backward begins on all ranks with the same
gradients; the rank with the unit's own graph goes through that, and sends what comes to the inputs. What comes to
weights stays there, but where other ranks hold these, too, or hooks of the user's are to see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_par.pipeline.between_steps.graphs.unit_graph import Group, UnitGraph, innermost, with_innermost
from lightning_par.pipeline.between_steps.graphs.unlinked import unlinked
from lightning_par.pipeline.between_steps.units.given_objects import Given
from lightning_par.pipeline.between_steps.units.unit_inputs import UnitInputs
from lightning_par.private.graph import current_backward, is_asked_for
from lightning_par.private.leaf_hooks import number_of_leaf_hooks, put_hooks, take_hooks
from lightning_par.private.module_hooks import number_of_backward_hooks
from lightning_par.private.transforms import is_batched, is_wrapped, without_saved_tensors_hooks
from lightning_par.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.units.module_calls import Outside

CALLED = "a module of a pipeline returns outside a step"
_ADVICE = "Call `backward` and `torch.autograd.grad` on all of them, and let one rank alone use what they give."


class UnitBackward:
    """A run of a unit's code of which a backward may come.

    Args:
        outside: carries out calls.
        path: the unit.
        unit: itself.
        source: the rank that has the run's own graph.
        inputs: what it was given, and its weights.
    """

    def __init__(self, outside: Outside, path: str, unit: nn.Module, source: int, inputs: UnitInputs) -> None:
        self.outside, self.path, self.unit, self.source, self.inputs = outside, path, unit, source, inputs
        self.here = outside.axis.rank == source
        self._passed: tuple[int, dict[int, Tensor]] = -1, {}

    def link(self, graph: UnitGraph, made: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of ``graph``, which have come to all ranks, in the graph of all; ``made`` are those here."""
        linked: dict[int, Tensor] = {}
        for group in graph.groups:
            inputs = [*(innermost(linked[n]) for n in group.of), *(self.inputs[name] for name in group.inputs)]
            values = [innermost(graph.tensors[n]).detach() for n in group.members]
            with torch.enable_grad(), without_saved_tensors_hooks():
                mine = (innermost(made[n]) for n in (*group.members, *group.of)) if self.here else ()
                own = [*map(_GraphAlone.apply, mine)] or [torch.empty(0)]
                there = {**linked, **dict(zip(group.members, values, strict=True))}
                aliases = [innermost(there[n]) for n in graph.aliases if n in there]
                found = _OfUnit.apply(_Part(self, group), values, own, aliases, *inputs)
            linked.update((n, with_innermost(graph.tensors[n], x)) for n, x in zip(group.members, found, strict=True))
        given = self.inputs.given()
        for n in graph.lost:
            plain = innermost(graph.tensors[n]).detach()
            linked[n] = with_innermost(graph.tensors[n], unlinked(plain, CALLED, given))
        for n in graph.retains:
            linked[n].retain_grad()
        return [linked[n] for n in range(len(graph.tensors))]

    # ------------------------------------------------------------------------------------- on the rank with the graph

    def passed(self, n: int) -> Tensor | None:
        """What the backward that runs has brought to the run's tensor ``n``, and from there on to the inputs."""
        task, gradients = self._passed
        return gradients.get(n) if task == current_backward() else None

    def note(self, n: int, gradient: Tensor) -> None:
        """It brings ``gradient``, too."""
        before, task = self.passed(n), current_backward()
        if self._passed[0] != task:
            self._passed = task, {}
        self._passed[1][n] = gradient if before is None else before + gradient


class _Part:
    """The backward of some tensors that a run has made.

    Args:
        call: the run.
        group: the tensors.
    """

    def __init__(self, call: UnitBackward, group: Group) -> None:
        self.call, self.group = call, group

    def backward(self, own: Sequence[Tensor], grads: Sequence[Tensor | None], asked: Sequence[bool]) -> list[Any]:
        """The gradients of the inputs. All ranks must call it.

        Args:
            own: what is behind the tensors, and behind those that they were made of, where they have their own graph.
            grads: theirs.
            asked: which of the inputs' gradients are asked for.
        """
        call, outside = self.call, self.call.outside
        if any(is_wrapped(g) or is_batched(g) for g in grads if g is not None):
            raise NotImplementedError(
                f"The gradients of {call.path!r} are asked for by a transform, as `is_grads_batched=True` and "
                "`vectorize=True` do. Its weights are on some ranks of the pipeline alone, which take one after the "
                "other: leave that out."
            )
        self.joint = outside.come_to_backward(f"came to the backward of {call.path!r} outside a step", _ADVICE)
        again = torch.is_grad_enabled()
        seeds = {f"gradient {call.inputs.count + n}": g for n, g in enumerate(grads) if g is not None}
        begun = {name: g.detach().requires_grad_(again) for name, g in seeds.items()} if call.here else {}
        inputs = call.inputs.beside(seeds, begun) if again else None
        link = None if inputs is None else UnitBackward(outside, call.path, call.unit, call.source, inputs).link
        mine: list[Tensor | None] = []
        ends = [end for end, g in zip(own, grads) if g is not None]
        run = partial(self._run, ends, own[len(grads) :], [*begun.values()], asked, again, mine)
        told = outside.runs(call.path, call.unit, (call.source,), Given(call.path, ()), run, inputs, link)
        return [self._received(n, g, mine) for n, g in enumerate(told)]

    def _run(
        self,
        ends: list[Tensor],
        of: Sequence[Tensor],
        seeds: list[Tensor],
        asked: Sequence[bool],
        again: bool,
        mine: list[Tensor | None],
    ) -> list[Tensor | None]:
        """Go through the run's own graph; what the other ranks need of the gradients."""
        call = self.call
        mine += [None] * len(asked)
        if again and self.group.of:
            raise NotImplementedError(
                f"{call.path!r} returns, or hooks keep, what it goes on with: between steps of a pipeline there are no "
                "gradients of gradients of that. Leave `create_graph=True` out."
            )
        seeds = self._what_is_left(seeds)
        own: list[Any] = [*map(_edge, of), *(leaves := [call.inputs.leaves[x] for x in self.group.inputs])]
        frozen = {n for n, x in enumerate(own) if isinstance(x, Tensor) and not x.requires_grad}  # since the forward
        wanted = [n for n, is_asked in enumerate(asked) if is_asked and n not in frozen]
        if seeds and wanted:
            hooks = [pair for x in leaves for pair in take_hooks(x)]  # they see the gradient where it arrives for good
            try:
                found = torch.autograd.grad(
                    ends, [own[n] for n in wanted], seeds, retain_graph=True, create_graph=again, allow_unused=True
                )
            finally:
                put_hooks(hooks)
            for place, gradient in zip(wanted, found, strict=True):
                mine[place] = gradient
        for n, passed in zip(self.group.of, mine):
            if passed is not None:
                call.note(n, passed)
        return [g if g is not None and self._is_sent(n, again) else None for n, g in enumerate(mine)]

    def _what_is_left(self, seeds: list[Tensor]) -> list[Tensor]:
        """Of the gradients what has not gone on to the inputs with those of what was made of these tensors."""
        passed = self.call.passed(self.group.members[0]) if len(self.group.members) == 1 else None
        if passed is None or not seeds:
            return seeds
        if torch.equal(seeds[0], passed):
            return []
        if any(map(number_of_backward_hooks, self.call.unit.modules())):
            raise NotImplementedError(
                f"{self.call.path!r} returns, or hooks keep, what it goes on with, and the loss uses that, too: hooks "
                "on gradients within it would see two in place of their sum. Keep a copy, `.detach()`, in the hook."
            )
        return [seeds[0] - passed]

    def _is_sent(self, n: int, again: bool) -> bool:
        """Whether other ranks need the gradient of an input."""
        weight = self._weight(n)
        if weight is None or again:
            return True
        if number_of_leaf_hooks(weight):
            if isinstance(weight, ShardedTensor):
                raise NotImplementedError(
                    f"A hook is on a weight of {self.call.path!r}, which is kept in parts on a stage of the pipeline: "
                    "a backward between steps can't show it the gradient on all ranks. Read `p.grad` after it."
                )
            return True
        return self.call.outside.holders_of(weight) != (self.call.source,)

    def _weight(self, n: int) -> Any:
        """The weight that is input ``n``; None where it is none."""
        before = len(self.group.of)
        return None if n < before else self.call.inputs.weight(self.group.inputs[n - before])

    def _received(self, n: int, sent: Tensor | None, mine: Sequence[Tensor | None]) -> Tensor | None:
        weight = self._weight(n)
        if weight is None or sent is not None and (torch.is_grad_enabled() or not self.call.here):
            if weight is not None:
                self.joint.ends.run_hooks(weight)
            return sent
        return mine[n] if mine else None


class _OfUnit(torch.autograd.Function):
    is_told = True

    @staticmethod
    def forward(
        ctx: Any, part: _Part, values: list[Tensor], own: list[Tensor], aliases: list[Tensor], *inputs: Tensor
    ) -> Any:
        ctx.part, ctx.own = part, len(own)
        ctx.set_materialize_grads(False)
        # Torch drops them, and with them the graph, or says that it has; and it says of what is written into since that
        # it was, which on one device its aliases would see.
        ctx.save_for_backward(*own, *aliases)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        asked = [is_asked_for(node) for node, _ in ctx.next_functions]
        return None, None, None, None, *ctx.part.backward(ctx.saved_tensors[: ctx.own], grads, asked)


class _GraphAlone(torch.autograd.Function):
    """The graph of a tensor, which is let go with it, without its values: user code may write into these, for which it
    matters alone whether the unit's own code needs them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


def _edge(behind: Tensor) -> GradientEdge:
    """Where gradients of the tensor arrive that `_GraphAlone` was asked of."""
    node: Any = behind.grad_fn
    return GradientEdge(*node.next_functions[0])
