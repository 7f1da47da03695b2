"""Parameters whose values are not their elements: quantized weights, as libraries for them lay them out.

Such a parameter is of a class of its own and holds codes, with what they mean in other tensors (a scale of each block).
A part of it means nothing, and neither does its shape: it stays whole, and what it is made of is as on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.base import AbsentTensor
from lightning_par.private.tensors import no_torch_function
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.memo import Memo

_PLAIN = (Tensor, nn.Parameter, ShardedTensor, int, float, bool, str, type(None))


def is_packed(x: Tensor) -> bool:
    """Whether ``x`` is of a class of its own, and holds whole numbers, or tensors that say what it means.

    A plain `nn.Parameter` of whole numbers is not, nor is one of a subclass that adds no tensors.
    """
    if type(x) in (Tensor, nn.Parameter) or isinstance(x, ShardedTensor | AbsentTensor):
        return False
    return _is_wrapper(x) or not (x.is_floating_point() or x.is_complex()) or bool(_meanings(x))


def packed_parameters(module: nn.Module) -> dict[str, str]:
    """The packed parameters of ``module`` by their first names, and what each is.

    Example::

        assert packed_parameters(nn.Linear(2, 2)) == {}
    """
    return {
        name: f"a {type(x).__name__} of {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
        for name, x in module.named_parameters()
        if is_packed(x)
    }


def constituents(x: Tensor) -> list[Tensor]:
    """The plain tensors that the packed ``x`` is made of, in an order that is the same wherever it is built alike."""
    if _is_wrapper(x):
        names: list[str] = x.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        inner = [part for name in names for part in _made_of(getattr(x, name))]
    else:
        with torch.no_grad():
            inner = [x.detach().as_subclass(Tensor)]
    return [*inner, *(part for found in _meanings(x) for part in _made_of(found))]


def has_own_functions(x: Any) -> bool:
    """Whether ``x`` is of another library's tensor class that says itself what torch functions do with it.

    It may call autograd functions of its own, which rules know nothing of: it is given whole tensors.
    """
    kind = type(x)
    return kind not in _PLAIN and isinstance(x, Tensor) and _SAYS_ITSELF[kind]


def _says_itself(kind: type) -> bool:
    from lightning_par.sharded.rules.several_axes import InnerAxisTensor  # which is imported with all rules

    said: Any = kind.__torch_function__  # type: ignore[attr-defined]
    plain = (no_torch_function, Tensor.__torch_function__)
    return getattr(said, "__func__", said) not in [getattr(f, "__func__", f) for f in plain] and not issubclass(
        kind, ShardedTensor | AbsentTensor | InnerAxisTensor
    )


_SAYS_ITSELF = Memo(_says_itself)


def _made_of(x: Tensor) -> list[Tensor]:
    return constituents(x) if is_packed(x) else [x.detach()]


def _is_wrapper(x: Tensor) -> bool:
    """Whether ``x`` has no memory of its own; it says by torch's own protocol which tensors it wraps."""
    return hasattr(x, "__tensor_flatten__") and hasattr(type(x), "__tensor_unflatten__")


def _meanings(x: Tensor) -> list[Tensor]:
    """Tensors in attributes of ``x``, and in those of objects there, but for what it wraps."""
    wrapped = set(x.__tensor_flatten__()[0]) if _is_wrapper(x) else set()  # type: ignore[attr-defined]
    return _held({name: value for name, value in vars(x).items() if name not in wrapped}, {id(x)})


def _held(value: Any, seen: set[int]) -> list[Tensor]:
    found = []
    for item in value.values() if isinstance(value, dict) else [value]:
        if id(item) in seen:
            continue
        seen.add(id(item))
        tensors = tensors_in(item)
        found += tensors
        if not tensors and not isinstance(item, type | nn.Module) and isinstance(getattr(item, "__dict__", None), dict):
            found += _held(vars(item), seen)
    return found
