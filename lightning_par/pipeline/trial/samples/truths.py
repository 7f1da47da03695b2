"""Truths over samples, followed: does each microbatch's own answer do for the whole batch's?

Of a whole batch all samples are finite where those of each microbatch are. So what raises unless all are, as torch's
own check of a distribution's parameters, is checked by each microbatch for itself, on the stage that has the values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_par.sharded.functions import name_of

_SETTLED = {"all": True, "_is_all_true": True, "any": False, "_is_any_true": False}
"""By the function, the answer that the whole batch gives if each microbatch gives it."""
_TURNS = frozenset({"logical_not", "bitwise_not", "__invert__"})


def settled(func: Any, given: list[Tensor], tags: dict[int, str], known: dict[int, bool], reduced: bool) -> bool | None:
    """The answer of ``func`` that the whole batch gives if each microbatch gives it; None if none is known.

    Args:
        func: a torch function.
        given: the tensors that it is given.
        tags: of what is made of sums or extremes over samples; see `lightning_par.pipeline.trial.samples.sample_sums`.
        known: such answers of results of other functions, by id.
        reduced: whether it made one value of several samples.

    Example::

        assert settled(torch.all, [torch.ones(2)], {}, {}, reduced=True)
        assert settled(torch.sum, [torch.ones(2)], {}, {}, reduced=True) is None
    """
    name = name_of(func)
    if reduced and not any(id(x) in tags for x in given):
        return _SETTLED.get(name)
    if name in _TURNS and len(given) == 1 and id(given[0]) in known:
        return not known[id(given[0])]
    return None
