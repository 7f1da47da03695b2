"""What a module's own optimizer keeps for its parameters, found out on a small one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_SHAPE = (6, 10)


@dataclass(frozen=True)
class OptimizerState:
    """Of one optimizer.

    Attributes:
        name: of its class.
        by_element: bytes for each element of a parameter, where it is in single precision.
        by_parameter: bytes for each parameter.
        note: what is assumed, where the module does not say it.
    """

    name: str
    by_element: float
    by_parameter: float
    note: str = ""


_ADAM = OptimizerState("AdamW", 8, 4, "taken to be AdamW")


def optimizer_state(module: nn.Module) -> OptimizerState:
    """What the optimizer of ``module`` keeps; AdamW's where `configure_optimizers` can't be asked without a Trainer.

    Example::

        assert optimizer_state(module_with_adam).by_element == 8
    """
    configure = getattr(module, "configure_optimizers", None)
    if not callable(configure):
        return _ADAM
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = next(_optimizers(configure()), None)
    except Exception:  # it may ask the trainer, whom there is not
        return _ADAM
    if found is None:
        return OptimizerState("none", 0, 0)
    try:
        return _probed(type(found), found.defaults)
    except Exception:  # of a class with arguments of its own
        return OptimizerState(type(found).__name__, 8, 4, "its state is taken to be as large as AdamW's")


def _optimizers(given: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(given, torch.optim.Optimizer):
        yield given
    elif isinstance(given, Mapping):
        yield from _optimizers(given.get("optimizer"))
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _optimizers(one)


def _probed(kind: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> OptimizerState:
    weight = nn.Parameter(torch.ones(_SHAPE))
    weight.grad = torch.ones(_SHAPE)
    options = {k: v for k, v in defaults.items() if k not in ("params", "fused", "capturable")}
    made = None
    for given in (options, {"lr": 0.1}):
        with contextlib.suppress(TypeError):
            made = kind([weight], **given)
            break
    if made is None:
        raise TypeError(kind)
    made.step()
    tensors = [x for x in made.state.get(weight, {}).values() if isinstance(x, Tensor)]
    by_element = sum(x.nbytes for x in tensors if x.numel() == weight.numel()) / weight.numel()
    by_parameter = sum(x.nbytes for x in tensors if x.numel() != weight.numel())
    return OptimizerState(kind.__name__, by_element, by_parameter)
