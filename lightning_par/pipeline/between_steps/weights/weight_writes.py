"""Functions that write into a weight between two steps: they run where it is, on values that are sent there before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.absent.list_entries import kept_entries
from lightning_par.absent.origin import ElsewhereError
from lightning_par.pipeline.between_steps.gradients.remote_gradient import Gradient
from lightning_par.pipeline.between_steps.weights.remote_weight import as_it_is
from lightning_par.pipeline.between_steps.weights.weight_reads import sent
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.remote_reads import JointGradients


def write(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Where what is written is; of weights that are not there, all ranks get the values first."""
    written = kwargs.get("out", next(iter((*args, *kwargs.values()))))
    many = isinstance(written, (list, tuple))
    weights = [x for x in tensors_in((args, kwargs)) if owner.is_weight(x)]
    for x in written if many else [written]:
        owner.replicas.refuse_write(name, x)
    there = [_holders(owner, name, x, weights) for x in (written if many else [written])]

    def given(value: Any, *homes: set[int]) -> Any:
        if value is written:
            return value
        if many and isinstance(value, (list, tuple)) and len(value) == len(there):
            return [given(x, home) for x, home in zip(value, there, strict=True)]
        return present(owner, name, value, set().union(*homes))

    args = [given(value, *there) for value in args]
    kwargs = {key: given(value, *there) for key, value in kwargs.items()}
    if name.startswith("_foreach_"):
        return _write_those_here(func, written, args, kwargs)
    if not is_elsewhere(written):
        return as_it_is(func, args, kwargs)
    owner.buffers_alone.write(func, written, args, kwargs)
    if name == "__setitem__":
        return None
    if "out" in kwargs and not any(map(is_elsewhere, tensors_in((args, {**kwargs, "out": None})))):
        # The generators of all ranks stay equal, should it draw.
        func(*args, **{**kwargs, "out": torch.empty(written.shape, dtype=written.dtype, device=written.device)})
        return written
    try:
        return as_it_is(func, args, kwargs)
    except ElsewhereError:  # it goes by parts or by values of what is written, where that is
        return written


def _write_those_here(func: Any, written: Any, args: Any, kwargs: Any) -> Any:
    """Run a function of lists for the entries that are here; it returns them all."""
    here = [not is_elsewhere(x) for x in written]
    if any(here):
        as_it_is(func, *kept_entries(here, args, kwargs))
    return written


def present(owner: JointGradients, name: str, value: Any, ranks: set[int]) -> Any:
    """``value`` as a function needs it that writes on ``ranks``: these have the weights and gradients in it."""

    def there(x: Tensor) -> Tensor:
        if isinstance(x, Gradient):
            return x.beside(ranks)
        away = owner.is_weight(x) and not ranks <= set(owner.holders_of(owner.name_of(x)))
        return sent(owner, name, x) if away else x

    return map_tensors(there, value)


def _holders(owner: JointGradients, name: str, written: Any, weights: list[Any]) -> set[int]:
    """The ranks that hold what ``name`` writes, of the ``weights``."""
    if owner.is_weight(written):
        return {*owner.holders_of(owner.name_of(written))}
    known = owner.others.known(written)
    if known is not None:
        return {*known}
    owner.meet(f"called `{name}` with weights of the model between two steps")
    return {*owner.others.ask(written)}
