"""Truths over samples, followed: does each microbatch's own answer do for the whole batch's?

Of a whole batch all samples are finite where those of each microbatch are, and its largest entry is below a limit where
theirs are. So what raises otherwise, as torch's own check of a distribution's parameters, is checked by each microbatch
for itself, on the stage that has the values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.functions import name_of

_SETTLED = {"all": True, "_is_all_true": True, "any": False, "_is_any_true": False}
"""By the function, the answer that the whole batch gives if each microbatch gives it."""
_EXTREMES = {"max": "top", "amax": "top", "min": "bottom", "amin": "bottom"}
_KEEP = frozenset({"detach", "clone", "contiguous"})
_TURNS = frozenset({"logical_not", "bitwise_not", "__invert__"})
_BELOW = frozenset({"lt", "le", "__lt__", "__le__", "less", "less_equal"})
_ABOVE = frozenset({"gt", "ge", "__gt__", "__ge__", "greater", "greater_equal"})

Known = bool | str
"""What is known of a value over samples: that answer; or that it is the ``"top"`` or the ``"bottom"`` of them."""


def settled(func: Any, args: Any, tags: dict[int, str], known: dict[int, Known], reduced: bool) -> Known | None:
    """What is known of the result of ``func``; None if nothing is.

    Args:
        func: a torch function.
        args: that it is given, with keywords beside them or without.
        tags: of what is made of sums or extremes over samples; see `lightning_par.pipeline.trial.samples.sample_sums`.
        known: of results of other functions, by id.
        reduced: whether it made one value of several samples.

    Example::

        assert settled(torch.all, (torch.ones(2),), {}, {}, reduced=True)
        assert settled(torch.sum, (torch.ones(2),), {}, {}, reduced=True) is None
    """
    name, given = name_of(func), tensors_in(args)
    if reduced and not any(id(x) in tags for x in given):
        return _SETTLED.get(name, _EXTREMES.get(name))
    of_first = known.get(id(args[0])) if args else None
    if name in _TURNS and isinstance(of_first, bool) and len(args) == 1:
        return not of_first
    if name in _KEEP and len(given) == 1:
        return of_first
    if name in _BELOW | _ABOVE and len(args) == 2:
        return _compared(name in _BELOW, args, tags, known)
    return None


def _compared(below: bool, args: Any, tags: dict[int, str], known: dict[int, Known]) -> bool | None:
    """Of a comparison of an extreme with what is the same for all samples. Not that none is above a limit: the largest
    entry of a whole batch may be no number, which isn't, and that of a microbatch above it all the same."""
    limit, extreme = args[1], known.get(id(args[0]))
    if extreme is None:
        limit, extreme, below = args[0], known.get(id(args[1])), not below
    is_same = id(limit) not in known and (not isinstance(limit, Tensor) or not limit.ndim and id(limit) not in tags)
    return True if is_same and extreme == ("top" if below else "bottom") else None
