"""What modules keep of their weights and buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""The attributes in which a module keeps its own; what is public walks those within, too, or hides what is None."""

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(PARAMETERS)
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter(BUFFERS)
modules_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter(MODULES)


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """As ``[*module.named_modules()]``, which takes several times as long: its generators nest as modules do."""
    found: dict[int, tuple[str, nn.Module]] = {}
    return [*found.values()] if _add_modules(module, "", found) else [*module.named_modules()]


def _add_modules(module: nn.Module, name: str, found: dict[int, tuple[str, nn.Module]]) -> bool:
    """Whether no class says otherwise."""
    if type(module).named_modules is not nn.Module.named_modules:
        return False
    found[id(module)] = name, module
    prefix = f"{name}." if name else ""
    return all(
        child is None or id(child) in found or _add_modules(child, prefix + own, found)
        for own, child in module.__dict__[MODULES].items()
    )


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """As ``[*module.named_parameters()]``; see `named_modules`."""
    if type(module).named_parameters is not nn.Module.named_parameters:
        return [*module.named_parameters()]
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, m in named_modules(module):
        for name, p in m.__dict__[PARAMETERS].items():
            if p is not None and id(p) not in found:
                found[id(p)] = f"{path}.{name}" if path else name, p
    return [*found.values()]


def hand_on_metadata(state: Any, new: Any) -> None:
    """Let a state dict have the versions of modules that another has: a module hangs them on what it returns."""
    if hasattr(state, "_metadata"):
        new._metadata = state._metadata


def weight_norms(module: nn.Module) -> list[Any]:
    """Those of the deprecated ``torch.nn.utils.weight_norm`` on ``module``, which keeps what they computed last."""
    from torch.nn.utils.weight_norm import WeightNorm

    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]


def forget_weak_references(rnn: nn.RNNBase) -> None:
    """Drop an RNN's weak references to its weights, which forbid to swap them."""
    rnn._flat_weight_refs = []


def renew_weak_references(rnn: nn.RNNBase) -> None:
    """Undo `forget_weak_references`, and lay out the weights anew for cuDNN, as the RNN does when it moves: those that
    this process has whole."""
    weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]
    rnn._flat_weights = weights
    rnn._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]
    if all(type(weight) is nn.Parameter for weight in weights):
        rnn.flatten_parameters()


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether the buffer ``name`` is in state dicts; torch says so in no public way that runs no hook of the user's."""
    return name not in module._non_persistent_buffers_set
