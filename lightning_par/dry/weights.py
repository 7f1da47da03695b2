"""Weights of a dry run: first deferred, while the strategy plans and cuts; then fakes, of which a step knows shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.build import build
from lightning_par.absent.deferred.deferred_tensor import Deferred, fake_of
from lightning_par.absent.deferred.history import Allocation, History, Store
from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.private.fake_tensors import FakeTensorMode
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.private.tensors import mark_parameter
from lightning_par.python_state import generators
from lightning_par.python_state.user_code import told_with_line
from lightning_par.sharded.identity import become, swappable
from lightning_par.sharded.tensor import leaf
from lightning_par.trial.large_values import LARGEST


def build_deferred(module: Any) -> Any:
    """A module whose weights are deferred: of a class or of a function that makes one; one that is there is copied.

    Raises:
        TypeError: it makes no module.
        ValueError: the code that builds it raises, or the module can't be copied; the message says what.

    Example::

        module = build_deferred(lambda: nn.Linear(1_000_000, 1_000_000))
        assert is_deferred(module.weight)
    """
    if isinstance(module, nn.Module):
        return _copied(module)
    if not callable(module):
        raise TypeError(f"module must be a LightningModule, its class or a function, got {module!r}.")
    holder = nn.Module()
    with generators.kept():
        try:
            made = build(holder, lambda: _held(holder, module), draws=False).result
        except Exception as error:  # the user's code
            raise ValueError(f"The module can't be built: {told_with_line(error)}") from error
    if not isinstance(made, nn.Module):
        raise TypeError(f"module must be a LightningModule or make one, not a {type(made).__name__}.")
    return made


def _held(holder: nn.Module, make: Callable[[], Any]) -> Any:
    made = make()
    if isinstance(made, nn.Module):
        holder.add_module("made", made)
    return made


def _copied(module: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {id(p): _standing(p) for p in module.parameters()}
    trainer = trainer_of(module)
    if trainer is not None:
        memo[id(trainer)] = None
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # any class may refuse to be copied
        raise ValueError(
            f"The {type(module).__name__} can't be copied ({type(error).__name__}: {error}). A dry run leaves the "
            "module that it is given as it is: give it the class, or a function that makes one."
        ) from error


def _standing(x: Tensor) -> nn.Parameter:
    """A deferred parameter of the form of ``x``, of which it is known nothing else."""
    meta = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta")
    memory = Allocation(meta.untyped_storage().nbytes(), torch.device("cpu"))
    with torch.no_grad():
        return nn.Parameter(Deferred(Store(History(memory)), meta), requires_grad=x.requires_grad)


def give_fakes(module: nn.Module, mode: FakeTensorMode) -> None:
    """Put fakes of ``mode`` in the place of what ``module`` holds on this rank, in place; small buffers have values.

    Example::

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            give_fakes(module, mode)
    """
    with swappable(module.modules()):
        for name, x in [*module.named_parameters(), *module.named_buffers()]:
            if is_elsewhere(x):
                continue
            held = leaf(x)
            if not isinstance(held, nn.Parameter) and held.numel() <= LARGEST:
                become(held, (held.value() if isinstance(held, Deferred) else held.detach()).clone(), name)
                continue
            fake = fake_of(held, mode)
            if isinstance(held, nn.Parameter):
                mark_parameter(fake)  # not a copy, to which fakes have weak references
            become(held, fake, name)
