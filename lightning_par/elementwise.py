"""Does an optimizer treat every element by itself? Found out by a trial, not by its class' name."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SHAPES = ((96, 64), (96,), (8, 6, 3, 3))  # the first is past 4096 elements, below which 8-bit optimizers keep 32 bits
_STEPS = 4


def kinds(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a param group as far as they may change what kind of function a step is: a number counts as
    zero or not, since a factor of zero turns a term off."""
    return {
        key: (type(x).__name__, bool(x != 0)) if isinstance(x, (int, float)) and not isinstance(x, bool) else x
        for key, x in group.items()
        if isinstance(x, (bool, int, float, str, type(None))) and key not in ("lr", "initial_lr")
    }


def acts_elementwise(optimizer: Optimizer, group: dict[str, Any] | None = None) -> bool:
    """Whether steps on a whole tensor equal steps on its halves, each in an optimizer of its own.

    They must equal in all that they leave behind: values, state and what the optimizer notes in its param group. Tried
    on small tensors with the optimizer's own class and options, split along each of the first two dims. An optimizer
    that can't be made for the trial counts as one that does not.

    Args:
        optimizer: is left as it is.
        group: the param group whose options count; by default the first.
    """
    group = optimizer.param_groups[0] if group is None else group
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    cuda = [device.index or 0] if device.type == "cuda" else []
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        with torch.random.fork_rng(devices=cuda), contextlib.suppress(Exception), torch.enable_grad():
            torch.manual_seed(0)
            values = [torch.randn(shape, device=device, dtype=dtype) for shape in _SHAPES]
            return all(_halves_agree(optimizer, group, value, tolerance) for value in values)
    return False


def _halves_agree(optimizer: Optimizer, group: dict[str, Any], value: Tensor, tolerance: float) -> bool:
    drift = torch.randn_like(value)  # as in training: statistics of how far the weights went along it shall move
    grads = [drift + torch.randn_like(value) * scale for scale in (0.1, 0.01, 1.0, 0.1)[:_STEPS]]
    whole = _stepped(optimizer, group, value, grads)
    update = (whole[0] - value).abs().max().item()
    if update == 0.0:
        return False
    for dim in range(min(value.ndim, 2)):
        halves = [
            _stepped(optimizer, group, v, [g.chunk(2, dim)[i] for g in grads])
            for i, v in enumerate(value.chunk(2, dim))
        ]
        joined = torch.cat([half[0] for half in halves], dim)
        if not (joined - whole[0]).abs().max().item() <= tolerance * update:
            return False
        if not all(_same(whole[i], [half[i] for half in halves], value.shape, dim, tolerance) for i in (1, 2)):
            return False
    return True


def _same(whole: Any, halves: list[Any], shape: torch.Size, dim: int, tolerance: float) -> bool:
    """Whether named values agree: tensors of the parameter's shape part by part, all others outright."""
    if any(half.keys() != whole.keys() for half in halves):
        return False
    for name, x in whole.items():
        others = [half[name] for half in halves]
        if isinstance(x, Tensor) and x.shape == shape:
            x, others = x.double(), [torch.cat(others, dim).double()]
        elif isinstance(x, Tensor) and x.numel() != 1:
            return False
        for y in others:
            if isinstance(x, (Tensor, float)):
                x, y = torch.as_tensor(x), torch.as_tensor(y)
                if not torch.allclose(x, y, rtol=tolerance, atol=tolerance * x.abs().max().item(), equal_nan=True):
                    return False
            elif x != y:
                return False
    return True


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], value: Tensor, grads: list[Tensor]
) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    """The value after steps with ``grads``, its state, and the param group's options."""
    parameter = nn.Parameter(value.clone())
    trial = _another(optimizer, group, parameter)
    for grad in grads:
        parameter.grad = grad.clone()
        trial.step()
    options = {key: x for key, x in trial.param_groups[0].items() if key != "params"}
    return parameter.detach(), dict(trial.state[parameter]), options


def _another(optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> Optimizer:
    """An optimizer like ``optimizer`` with ``parameter`` alone.

    Raises:
        TypeError: not all arguments of its class are known.
    """
    signature = inspect.signature(type(optimizer).__init__).parameters
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    accepted = [name for name, p in list(signature.items())[1:] if p.kind not in kinds]
    if not accepted or accepted[0] != "params":
        raise TypeError(f"{type(optimizer).__name__} takes no parameters")
    attributes = vars(optimizer)
    known = {**{key.lstrip("_"): x for key, x in attributes.items()}, **attributes, **optimizer.defaults}
    missing = [name for name in accepted[1:] if name not in known]
    if missing:
        raise TypeError(f"what {type(optimizer).__name__} was given for {missing} is not known")
    options = {key: x.clone() if isinstance(x, Tensor) else x for key, x in group.items() if key != "params"}
    rate = options.get("lr")
    if isinstance(rate, (int, float, Tensor)) and float(rate) == 0.0:  # as at the start of a warm-up
        options["lr"] = torch.full_like(rate, 0.01) if isinstance(rate, Tensor) else 0.01
    trial = type(optimizer)([{**options, "params": [parameter]}], **{name: known[name] for name in accepted[1:]})
    for name, x in attributes.items():
        if isinstance(x, (bool, int, float, str)) and name in vars(trial):
            setattr(trial, name, x)
    return trial
