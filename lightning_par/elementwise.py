"""Does an optimizer treat every element, or every parameter, by itself? A trial tells, not its class' name."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.comm import Axis
from lightning_par.pipeline.elsewhere import Elsewhere, Origin

_SHAPES = ((96, 64), (96,), (8, 6, 3, 3))  # the first is past 4096 elements, below which 8-bit optimizers keep 32 bits
_PAIR = ((8, 6), (6, 4))  # of matrices, since Muon takes nothing else
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


def refuse_joint_updates(optimizer: Optimizer) -> None:
    """Refuse an optimizer that could not be stepped by ranks of which each has some of the parameters.

    Raises:
        ValueError: what it does to one parameter depends on another, as in Prodigy, or it can't be tried.
    """
    name = type(optimizer).__name__
    advice = "Use TensorParallelStrategy, or another optimizer."
    for _, group in {repr(kinds(group)): group for group in optimizer.param_groups}.items():
        apart = acts_apart(optimizer, group)
        if apart is None:
            raise ValueError(
                f"{name} could not be tried on small parameters, so it is not known whether each stage of a pipeline "
                f"can step its own. Let its class keep its arguments in `defaults` or attributes. {advice}"
            )
        if not apart:
            raise ValueError(
                f"{name}'s update of one parameter depends on the gradients of others, which other stages of the "
                f"pipeline hold. {advice}"
            )


def acts_apart(optimizer: Optimizer, group: dict[str, Any] | None = None) -> bool | None:
    """Whether a joint step on two parameters equals steps by two ranks of which each holds one of them.

    As `acts_elementwise`, but a rank's other parameter is there without values and gradient. None where it can't be
    tried, with dense gradients or with sparse ones.

    Args:
        optimizer: is left as it is.
        group: the param group whose options count; by default the first.
    """
    group = optimizer.param_groups[0] if group is None else group
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    cuda = [device.index or 0] if device.type == "cuda" else []
    for dtype, sparse in ((torch.float64, False), (torch.float32, False), (torch.float64, True)):
        tolerance = 1e-9 if dtype == torch.float64 else 1e-4
        with torch.random.fork_rng(devices=cuda), contextlib.suppress(Exception), torch.enable_grad():
            torch.manual_seed(0)
            values = [torch.randn(shape, device=device, dtype=dtype) for shape in _PAIR]
            return _ranks_agree(optimizer, group, values, sparse, tolerance)
    return None


def _ranks_agree(
    optimizer: Optimizer, group: dict[str, Any], values: list[Tensor], sparse: bool, tolerance: float
) -> bool:
    drifts = [torch.randn_like(value) for value in values]
    grads = [[drift + torch.randn_like(drift) * scale for drift in drifts] for scale in (0.1, 0.01, 1.0, 0.1)]
    if sparse:
        grads = [[g.to_sparse(1) for g in step] for step in grads]
    axis = Axis("pipeline", (0, 1), 0, None)
    away = [Elsewhere(x.shape, x.dtype, x.device, Origin("another", (1,), axis), True) for x in values]
    here = [nn.Parameter(value.clone()) for value in values]
    joint = _stepped_together(optimizer, group, here, grads)
    for i in (0, 1):
        own = nn.Parameter(values[i].clone())
        given = [own if j == i else away[j] for j in (0, 1)]
        try:
            alone = _stepped_together(optimizer, group, given, grads)
        except Exception:  # it asks for all gradients
            return False
        update = (here[i] - values[i]).abs().max().item()
        if not (here[i] - own).abs().max().item() <= tolerance * update:
            return False
        for x, y in ((joint.state[here[i]], alone.state[own]), (_options(joint), _options(alone))):
            if x.keys() != y.keys() or not all(_close(x[key], y[key], tolerance) for key in x):
                return False
    return True


def _stepped_together(
    optimizer: Optimizer, group: dict[str, Any], parameters: list[Any], grads: list[list[Tensor]]
) -> Optimizer:
    trial = _another(optimizer, group, parameters, wraps=True)
    for step in grads:
        for p, grad in zip(parameters, step, strict=True):
            p.grad = None if isinstance(p, Elsewhere) else grad.clone()
        trial.step()
    return trial


def _options(trial: Optimizer) -> dict[str, Any]:
    return {key: x for key, x in trial.param_groups[0].items() if key != "params"}


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
        if not all(_close(x, y, tolerance) for y in others):
            return False
    return True


def _close(x: Any, y: Any, tolerance: float) -> bool:
    if not isinstance(x, (Tensor, float)):
        return bool(x == y)
    x, y = torch.as_tensor(x).double(), torch.as_tensor(y).double()
    close = x.shape == y.shape and torch.allclose(
        x, y, rtol=tolerance, atol=tolerance * x.abs().max().item(), equal_nan=True
    )
    return bool(close)


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], value: Tensor, grads: list[Tensor]
) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    """The value after steps with ``grads``, its state, and the param group's options."""
    parameter = nn.Parameter(value.clone())
    trial = _another(optimizer, group, [parameter])
    for grad in grads:
        parameter.grad = grad.clone()
        trial.step()
    return parameter.detach(), dict(trial.state[parameter]), _options(trial)


def _another(optimizer: Optimizer, group: dict[str, Any], parameters: list[Any], wraps: bool = False) -> Optimizer:
    """An optimizer like ``optimizer`` with ``parameters`` alone; with ``wraps`` one that wraps another is made, too.

    Raises:
        TypeError: not all arguments of its class are known.
    """
    signature = inspect.signature(type(optimizer).__init__).parameters
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    accepted = [name for name, p in list(signature.items())[1:] if p.kind not in kinds]
    attributes = vars(optimizer)
    known = {**{key.lstrip("_"): x for key, x in attributes.items()}, **attributes, **optimizer.defaults}
    inner = known.get(accepted[0]) if accepted else None
    if not accepted or accepted[0] != "params" and not (wraps and isinstance(inner, Optimizer)):
        raise TypeError(f"{type(optimizer).__name__} takes no parameters")
    missing = [name for name in accepted[1:] if name not in known]
    if missing:
        raise TypeError(f"what {type(optimizer).__name__} was given for {missing} is not known")
    first: Any
    if isinstance(inner, Optimizer):
        first = _another(inner, group, parameters, wraps)
    else:
        first = [{**_movable(group), "params": parameters}]
    trial = type(optimizer)(first, **{name: known[name] for name in accepted[1:]})
    for name, x in attributes.items():
        if isinstance(x, (bool, int, float, str)) and name in vars(trial):
            setattr(trial, name, x)
    return trial


def _movable(group: dict[str, Any]) -> dict[str, Any]:
    """The group's options, with a learning rate that moves something even where a warm-up begins at zero."""
    options = {key: x.clone() if isinstance(x, Tensor) else x for key, x in group.items() if key != "params"}
    rate = options.get("lr")
    if isinstance(rate, (int, float, Tensor)) and float(rate) == 0.0:
        options["lr"] = torch.full_like(rate, 0.01) if isinstance(rate, Tensor) else 0.01
    return options
