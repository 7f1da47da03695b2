"""Modules that are in a checkpoint themselves, as hyper-parameters may be: written as one device writes them, whole."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_par.private.checkpoints import parameter_of_pickle
from lightning_par.private.module_hooks import HOOKS
from lightning_par.private.modules import BUFFERS, MODULES, PARAMETERS, modules_of

_KEY = "tensors of modules, by where they are"
_DICTS = (PARAMETERS, BUFFERS)


class _Parameter:
    """Pickled as torch pickles an `nn.Parameter`, of a tensor whose values may come only then."""

    def __init__(self, tensor: Tensor, requires_grad: bool) -> None:
        self.tensor, self.requires_grad = tensor, requires_grad

    def __reduce__(self) -> tuple[Any, ...]:
        return parameter_of_pickle(), (self.tensor, self.requires_grad, OrderedDict())


def with_modules_apart(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """``checkpoint`` with copies of the modules in it, and their tensors beside; alike on all ranks."""
    tensors: dict[str, Tensor] = {}
    apart = {key: _apart(x, str(key), tensors, {}) for key, x in checkpoint.items()}
    return {**apart, _KEY: tensors} if tensors else dict(checkpoint)


def with_modules_whole(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What `with_modules_apart` gave, once its tensors are whole: these are put where they belong."""
    tensors = checkpoint.pop(_KEY, {})
    for key, x in checkpoint.items() if tensors else ():
        _fill(x, str(key), tensors, set())
    return checkpoint


def _apart(value: Any, path: str, tensors: dict[str, Tensor], made: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        return _module_apart(value, path, tensors, made)
    if isinstance(value, dict):
        items = {key: _apart(x, f"{path}/{key}", tensors, made) for key, x in value.items()}
        same = all(items[key] is x for key, x in value.items())
        return value if same else type(value)(items) if type(value) in (dict, OrderedDict) else items
    if type(value) in (list, tuple):
        new = [_apart(x, f"{path}/{n}", tensors, made) for n, x in enumerate(value)]
        return value if all(a is b for a, b in zip(new, value)) else type(value)(new)
    return value


def _module_apart(module: nn.Module, path: str, tensors: dict[str, Tensor], made: dict[int, Any]) -> nn.Module:
    if id(module) in made:
        return made[id(module)]
    made[id(module)] = new = copy.copy(module)  # before its children, which may hold it
    for hooks in (name for name in HOOKS if name in vars(module)):
        vars(new)[hooks] = type(vars(module)[hooks])(
            (number, hook) for number, hook in vars(module)[hooks].items() if not _is_ours(hook)
        )
    for name in _DICTS:
        vars(new)[name] = own = dict(vars(module)[name])
        tensors.update((f"{path}.{key}", x) for key, x in own.items() if isinstance(x, Tensor))
    vars(new)[MODULES] = {
        name: None if x is None else _module_apart(x, f"{path}.{name}", tensors, made)
        for name, x in modules_of(module).items()
    }
    return new


def _is_ours(hook: Any) -> bool:
    """Whether a hook is of the run, not the user's."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _fill(value: Any, path: str, tensors: Mapping[str, Tensor], met: set[int]) -> None:
    if id(value) in met:
        return
    if isinstance(value, nn.Module):
        met.add(id(value))
        for kind in _DICTS:
            for name, x in vars(value)[kind].items():
                if f"{path}.{name}" in tensors:
                    whole = tensors[f"{path}.{name}"]
                    parameter = kind == PARAMETERS and not isinstance(whole, nn.Parameter)
                    vars(value)[kind][name] = _Parameter(whole, x.requires_grad) if parameter else whole
        for name, child in modules_of(value).items():
            _fill(child, f"{path}.{name}", tensors, met)
    elif isinstance(value, (dict, list, tuple)):
        for key, x in value.items() if isinstance(value, dict) else enumerate(value):
            _fill(x, f"{path}/{key}", tensors, met)
