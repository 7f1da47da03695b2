"""Functions of weights alone by which a step updates weights, called as user code calls them between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.program.program import Key
from lightning_par.pipeline.program.tape import Absent
from lightning_par.pipeline.program.update_calls import UpdateCall
from lightning_par.pipeline.trial.call_context import as_around
from lightning_par.python_state.nested_tensors import returned_tensors, tensors_in
from lightning_par.sharded.functions import name_of, writes_into

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.remote_reads import JointGradients


def update_weights(owner: JointGradients, module: nn.Module, calls: Sequence[UpdateCall]) -> None:
    """Make ``calls``, one after another, which are given weights of ``module``.

    All ranks must call it with the same, while ``owner`` shows weights.
    """
    made: dict[Key, Tensor] = {}
    needed, last = _needed(owner, calls), {event: call.index for call in calls for event in call.makers()}
    with torch.no_grad():
        for call in calls:
            owner.needed = needed.get(call.index)
            try:
                with as_around(call.around):
                    result = _call(call.func, *call.given(made, module), owner)
            except NotImplementedError as error:
                raise NotImplementedError(f"{call.place}: {error}") from error
            made = {key: x for key, x in made.items() if last[key[0]] > call.index}  # of a model's size, all in all
            if call.index in last:
                made.update(((call.index, n), x) for n, x in enumerate(returned_tensors(result)))


def _needed(owner: JointGradients, calls: Sequence[UpdateCall]) -> dict[int, tuple[int, ...] | None]:
    """By event, the ranks that need what it makes: those of the weight that is written with it at last."""
    by_event = {call.index: call for call in calls}
    found: dict[int, tuple[int, ...] | None] = {}
    for call in reversed(calls):
        if writes_into(getattr(call.func, "__name__", "")) or "out" in call.kwargs:
            into = (call.kwargs["out"],) if "out" in call.kwargs else call.args[:1]
            while into and isinstance(into[0], Absent):  # a view
                into = by_event[into[0].key[0]].args[:1]
            weights = [x for x in tensors_in(into) if owner.is_weight(x)]
            found[call.index] = owner.holders_of(owner.name_of(weights[0])) if len(weights) == 1 else None
        for event in call.makers():
            found.setdefault(event, found.get(call.index))
    return found


def _call(func: Any, args: Any, kwargs: Any, owner: JointGradients) -> Any:
    """``func``; ``x.data`` and ``x.data = y`` as the user writes them, for which classes of tensors have their ways."""
    name = name_of(func)
    if name == "data":
        return args[0].data
    if name == "__deepcopy__":  # by a memo that knows what stood for it as the step ran dry
        return args[0].detach().clone()
    if name == "__set__":
        args[0].data = owner.data_for(*args)
        return None
    return func(*args, **kwargs)
