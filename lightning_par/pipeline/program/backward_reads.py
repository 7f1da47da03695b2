"""Which weights a step's backward reads: on one device a write between the two counts there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_par.pipeline.program.read_only_inputs import memory_reference
from lightning_par.private.graph import Accumulation, function_of, is_known_node, kept_by_node, made_by
from lightning_par.private.module_hooks import backward_hooks_on_all

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis


class BackwardReads:
    """What the backward of a recorded step reads.

    Args:
        run: of the step.
        loss: what it returned to run backward from.

    Example::

        assert BackwardReads(run, loss).among(["linear.weight", "linear.bias"]) == ["linear.weight"]
    """

    def __init__(self, run: Analysis, loss: Tensor | None) -> None:
        self._loss, self._names = loss, run.values.memory.names
        # code of the user's, or modules that are run again, may read any
        self._all = bool(run.hooked or run.recomputes or run.hooks_on_gradients or backward_hooks_on_all())
        self._found: frozenset[str] | None = None

    def among(self, names: list[str]) -> list[str]:
        """Those of the weights of these names that it may read."""
        if self._found is None and not self._all:
            self._found = _read(self._loss, self._names)
            self._all = self._found is None
        return names if self._found is None else [name for name in names if name in self._found]


def _read(loss: Tensor | None, names: Mapping[Any, str]) -> frozenset[str] | None:
    """The names of the weights that are kept for the backward of ``loss``; None where that is not known."""
    found = set[str]()
    for node in _nodes(None if loss is None else made_by(loss)):
        kept = [] if isinstance(node, Accumulation) else _kept(node)
        if kept is None:
            return None
        found.update(names.get(memory_reference(x), "") for x in kept)
    return frozenset(found)


def _kept(node: Any) -> list[Tensor] | None:
    """The tensors that a ``node`` keeps; None where that is not known."""
    function = function_of(type(node))
    if function is None:
        return kept_by_node(node) if is_known_node(node) else None
    if not function.__module__.startswith("lightning_par."):
        return None
    found = []
    for following, _ in node.next_functions:  # of weights that it is given, or of their views, it may keep any
        while following is not None and len(following.next_functions) == 1:
            following = following.next_functions[0][0]
        if isinstance(following, Accumulation):
            found.append(following.variable)
    return found


def _nodes(first: Any) -> Iterator[Any]:
    met, waiting = set[Any](), [first]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in met:
            met.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]
