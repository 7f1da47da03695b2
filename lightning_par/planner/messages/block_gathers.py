"""How often a step gathers a block of stored weights, and sums its gradients: for each call, and each backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_par.planner.messages.stored_parts import BlockMessage
from lightning_par.planner.prediction import ModuleUses
from lightning_par.planner.recording.uses import LAST, StageUses, Use


@dataclass(frozen=True)
class Gathering:
    """A block's weights for one call of it, or for all between two backwards if they stay whole meanwhile.

    Attributes:
        gathers: messages that gather them.
        sums: messages that sum their gradients.
        off: weights that require none meanwhile.
        alone: weights that are gathered without the others, each as often as it is here: for what backward runs again
            of a call.
    """

    gathers: int
    sums: int
    off: frozenset[str]
    alone: tuple[str, ...] = ()


def gatherings(
    block: BlockMessage, tree: ModuleUses, stage: StageUses, reshard: bool, is_last: bool
) -> list[Gathering]:
    """Those of ``block`` in a step.

    Args:
        block: any.
        tree: what the step does with the module.
        stage: what the stage does of that.
        reshard: whether a block is let go after a call.
        is_last: whether it is the one that forward calls last, with which backward begins.
    """
    begins = [n for n, path in enumerate(tree.calls) if path in block.paths and n in stage.calls]
    stays = block.stays or not reshard
    found: dict[int, list[tuple[str, Use]]] = {tree.after(n) if stays else n: [] for n in begins}
    for name in block.names:
        for use in stage.uses.get(name, ()):
            key = use.after if stays else max((n for n in begins if n <= use.call), default=-1)
            if block.has(use.path) and key in found:
                found[key].append((name, use))
    first = min(begins, default=None)
    asleep = [Gathering(1, 0, frozenset()) for uses in found.values() if stays and _sleeps_first(uses)]
    return asleep + [_gathering(key if stays else tree.after(key), uses, tree, stays or is_last, reshard, block.stays,
                       None if block.stays else first if stays else key) for key, uses in found.items()]  # fmt: skip


def _gathering(
    after: int, uses: Sequence[tuple[str, Use]], tree: ModuleUses, held: bool, reshard: bool, stays: bool,
    begin: int | None,
) -> Gathering:  # fmt: skip
    whole = [use for _, use in uses if begin is None or not use.is_run_alone(begin)]
    needed = frozenset[int]().union(*(use.needed for use in whole))
    # what takes none of them as it is seen, such as functions of the user's own, is taken to end in the loss
    summed = frozenset[int]().union(*(use.summed for _, use in uses)) if uses or tree.backwards else LAST
    on = {name for name, use in uses if not use.off}
    off = frozenset(name for name, _ in uses) - on if tree.backwards else frozenset[str]()
    if not stays and _is_run_again(whole):
        again = len(needed)  # for which the graph has kept none of the weights
    else:
        again = len(needed - {after} if held else needed) if reshard else 0  # else the graph itself has them
    again += max((use.asked for use in whole), default=0) * (reshard and not held)
    calls = {use.call for use in whole if use.needed and use.again is not None} if stays else frozenset[int]()
    # what stays is let go at forward's end: each call that backward runs again gathers it, but where nothing is let go
    again += len(calls) if reshard else min(len(calls), 1)
    alone = tuple(name for name, use in uses if use not in whole and use.needed)
    return Gathering(1 + again, len(summed), off, alone)


def _sleeps_first(uses: Sequence[tuple[str, Use]]) -> bool:
    """Whether weights that stay are gathered without autograd, and then, in the graph, once more."""
    on = [use.call for _, use in uses if use.graph]
    return bool(on) and any(use.call < min(on) for _, use in uses)


def _is_run_again(uses: Sequence[Use]) -> bool:
    """Whether backward runs all again that needs a block's weights."""
    needing = [use.again is not None for use in uses if use.needed]
    return bool(needing) and all(needing)


def in_vain(blocks: Sequence[BlockMessage], tree: ModuleUses, reshard: bool) -> list[BlockMessage]:
    """The blocks whose gather was begun for the next call, and given up as the step ran a backward before that."""
    if not tree.backwards:
        return []
    calls = [(n, block) for block in blocks for n, path in enumerate(tree.calls) if path in block.paths]
    calls.sort(key=lambda call: call[0])
    order, found = [block for _, block in calls], []
    ahead: BlockMessage | None = None
    kept: set[int] = set()
    for i, (n, block) in enumerate(calls):
        if i and tree.after(n) > tree.after(calls[i - 1][0]):
            found += [] if ahead is None else [ahead]
            ahead = None
            kept.clear()
        ahead = None if ahead is block else ahead
        if block.stays or not reshard:
            kept.add(id(block))
        if ahead is None:
            ahead = next((x for x in order[i + 1 :] if x is not block and id(x) not in kept), None)
    return found
