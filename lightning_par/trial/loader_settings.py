"""The settings that a user's ``train_dataloader()`` or the like reads: a batch size, a flag, a count."""

from __future__ import annotations

import inspect
import types
from typing import Any

from lightning_par.private.lightning_modules import HPARAMS
from lightning_par.python_state.code_names import names_of
from lightning_par.python_state.found import ATOMS
from lightning_par.python_state.user_code import is_library


def read_by(source: Any) -> dict[str, Any]:
    """By name, the numbers, strings and flags that the hook of a Lightning data source may read of its owner.

    They are attributes of the owner that the hook's code, or that of other methods it names, names; items and
    attributes of such, where these are dicts or objects of the user's.

    Example::

        class Data(LightningDataModule):
            batch_size = 2

            def train_dataloader(self):
                return DataLoader(rows, batch_size=self.batch_size)

        assert read_by(private.data_source(trainer)) == {"batch_size": 2}
    """
    if not source.is_module():
        return {}
    owner, found = source.instance, dict[str, Any]()
    for name in _named(owner, source.name):
        value = vars(owner).get(name, inspect.getattr_static(type(owner), name, None))
        if type(value) in ATOMS:
            found[name] = value
        else:
            found |= {f"{name}.{key}": x for key, x in _inside(value).items() if type(x) in ATOMS}
    return found


def _named(owner: Any, hook: str) -> set[str]:
    names, waiting = set[str](), [hook]
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names.add(name)
        code = _code(owner, name)
        if code is not None:
            waiting += names_of(code).attributes
    return names | {HPARAMS} if "hparams" in names else names


def _code(owner: Any, name: str) -> types.CodeType | None:
    """Of a method or property of the user's."""
    value = inspect.getattr_static(owner, name, None)
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    function = inspect.unwrap(value) if callable(value) else None
    if isinstance(function, types.FunctionType) and not is_library(function.__module__):
        return function.__code__
    return None


def _inside(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    if is_library(type(value).__module__) or not hasattr(value, "__dict__") or isinstance(value, type):
        return {}
    return vars(value)
