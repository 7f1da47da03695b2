"""The batch of a plan: one as it is, or the first of a DataLoader or a LightningDataModule, as a step will get it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_par.absent.deferred.deferred_tensor import Deferred
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.python_state import generators
from lightning_par.python_state.kept import kept
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.python_state.user_code import told_with_line
from lightning_par.strategies.entry_points import fetches_itself
from lightning_par.strategies.namespace import OTHER, namespace_of
from lightning_par.trial.first_batch import TRANSFERS, is_users
from lightning_par.trial.module_copy import copied

_LIGHTNINGS = tuple(f"{one.pytorch}." for one in OTHER)


@dataclass(frozen=True)
class Given:
    """What a Trainer would load: hooks around a batch's transfer have yet to run.

    Attributes:
        batch: the first.
        data: the LightningDataModule that it is of, if any.
    """

    batch: Any
    data: Any = None

    def hooks(self, module: nn.Module) -> list[str]:
        """The names of the user's own hooks around the transfer, of the datamodule or of ``module``."""
        if not hasattr(module, TRANSFERS[0]) or fetches_itself(getattr(module, "training_step", None)):
            return []  # of what a step fetches Lightning prepares nothing
        return [name for name in TRANSFERS if self._is_datas(name) or is_users(module, name)]

    def _is_datas(self, name: str) -> bool:
        return self.data is not None and is_users(self.data, name)

    def transferred(self, module: Callable[[], nn.Module], hooks: list[str], batch: Any) -> Any:
        """``batch`` after ``hooks``, as Lightning chooses and calls them; of their run nothing else is left.

        Raises:
            ValueError: they raise, or go by values of weights; the message says why.
        """
        try:
            owner = module()
            weights = {id(p) for p in owner.parameters()}
            with generators.kept(), _in_run(self.data, owner), kept(owner, [owner, self.data], weights, is_copy=False):
                batch = copied(batch)
                for name in hooks:
                    hook = getattr(self.data if self._is_datas(name) else owner, name)
                    where = (torch.device("cpu"),) if name == "transfer_batch_to_device" else ()
                    batch = hook(batch, *where, 0)
        except Exception as error:  # the user's code
            raise ValueError(f"raises {told_with_line(error)}") from error
        if any(x.is_meta or isinstance(x, Deferred) for x in tensors_in(batch)):
            raise ValueError("goes by weights, of which a plan has no values")
        return batch


def read_batch(batch: Any) -> Given:
    """A batch, of a function that makes one, or the first of a DataLoader or of a LightningDataModule.

    Raises:
        ValueError: it can't be made; the message says why and where.
    """
    try:
        given = batch() if callable(batch) else batch
        if is_datamodule(type(given)):
            return Given(_first_of(given), given)
        return Given(next(iter(given)) if isinstance(given, DataLoader) else given)
    except Exception as error:  # the user's code
        raise ValueError(f"The batch can't be made: {told_with_line(error)}.") from error


def is_datamodule(kind: Any) -> bool:
    """Whether it is the class of a LightningDataModule, of either Lightning."""
    bases = kind.__mro__ if isinstance(kind, type) else ()
    return any(base.__name__ == "LightningDataModule" and base.__module__.startswith(_LIGHTNINGS) for base in bases)


def _first_of(data: Any) -> Any:
    """The first batch for training, as a Trainer has it of its loaders."""
    loader = namespace_of(type(data)).from_pytorch("utilities", "CombinedLoader")
    data.prepare_data()
    data.setup("fit")
    batch, _, _ = next(iter(loader(data.train_dataloader(), "max_size_cycle")))
    return batch


@contextmanager
def _in_run(data: Any, module: nn.Module) -> Iterator[None]:
    """A datamodule's hooks may ask its Trainer, as for ``self.trainer.training``."""
    if data is None or data.trainer is not None:
        yield
        return
    data.trainer = trainer_of(module)
    try:
        yield
    finally:
        data.trainer = None
