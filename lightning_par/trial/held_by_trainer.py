"""The user's callbacks, data module and datasets as a trial run finds them at its trainer: what it sets there, or
appends, goes with it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Set
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par.private.loaders import data_source
from lightning_par.private.modes import no_modes
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.python_state.user_code import is_users_code

CONTAINERS = (list, dict, set, deque)
_SMALL = 1 << 16  # elements
HELD = frozenset(("callbacks", "datamodule"))
"""The attributes of a trainer where callbacks and the data module are."""
LOADERS = {
    "train_dataloader": "fit",
    "val_dataloaders": "validate",
    "test_dataloaders": "test",
    "predict_dataloaders": "predict",
}
"""Those where loaders are, and the function of the trainer that goes over them."""


def named_of_trainer(trainer: Any, words: Set[str], packages: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """The user's datasets, callbacks and data module at ``trainer``, by name, as far as code with these words may reach
    them.

    Args:
        trainer: of either of Lightning's packages.
        words: names of attributes.
        packages: installed packages that count as the user's.
    """
    for name in sorted(LOADERS.keys() & words):  # a dataset of two loaders has one name, on all ranks
        for n, loader in enumerate(tree_leaves(loaders_of(trainer, name))):
            dataset = getattr(loader, "dataset", None)
            if is_users_code(type(dataset).__module__, packages):
                yield f"{name}[{n}].dataset", dataset
    if "callbacks" in words:
        for n, callback in enumerate(trainer.callbacks):
            if is_users_code(type(callback).__module__, packages):
                yield f"callbacks[{n}]", callback
    if "datamodule" in words and getattr(trainer, "datamodule", None) is not None:
        yield "datamodule", trainer.datamodule


def loaders_of(trainer: Any, name: str) -> Any:
    """The ``trainer``'s loaders under this name, those of the run that is about to begin included."""
    value = getattr(trainer, name, None)
    if value is None and trainer.state.fn is not None and LOADERS[name] == trainer.state.fn.value:
        # Lightning fills it only when its loops start.
        value = getattr(vars(data_source(trainer)).get("dataloader"), "given", None)
    return value


def set_apart(value: Any) -> Any:
    """Copies of callbacks, in a list, or of one data module. What they hold is shared, which may be large, as data sets
    or an average of the weights, and put back behind the trial; but for containers of their own, and small tensors."""
    if isinstance(value, list):
        return [*map(set_apart, value)]
    if value is None or isinstance(value, nn.Module) or not isinstance(getattr(value, "__dict__", None), dict):
        return value
    try:
        apart = object.__new__(type(value))
    except TypeError:  # made by C++
        return value
    with no_modes():  # no function of the step's
        vars(apart).update({name: _apart(x) for name, x in vars(value).items()})
    return apart


def with_data_apart(loaders: Any) -> Any:
    """Copies of loaders, in whatever the user keeps them, whose datasets are `set_apart`."""
    return tree_map(_with_data_apart, loaders)


def _with_data_apart(loader: Any) -> Any:
    if not isinstance(loader, DataLoader):
        return loader
    apart = copy.copy(loader)
    vars(apart)["dataset"] = set_apart(loader.dataset)  # which it lets nobody assign
    return apart


def _apart(x: Any) -> Any:
    if type(x) in CONTAINERS:
        return copy.copy(x)
    if type(x) is Tensor and x.is_leaf and not x.requires_grad and x.numel() <= _SMALL:
        return x.clone()
    return x
