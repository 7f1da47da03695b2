"""What a module's own optimizers keep for its parameters, found out on a small one of each group."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.optim.lone_step import state_after_a_step
from lightning_par.optim.torch_optimizers import BY_ELEMENT, runs_torchs_step
from lightning_par.planner.recording.profile import Parameter
from lightning_par.planner.recording.shaped_state import ShapedState
from lightning_par.private.optimizers import has_step_hooks
from lightning_par.python_state.user_code import told_with_line

_SHAPE = (6, 10)
_OF_DEVICE = ("fused", "capturable")
"""Options that change where a step runs, and that a CPU may not have."""


@dataclass(frozen=True)
class StateBytes:
    """Of one parameter: bytes for each of its elements, where it is in single precision, and beside these."""

    by_element: float
    by_parameter: float


@dataclass(frozen=True)
class OptimizerState:
    """What the optimizers of a module keep.

    Attributes:
        name: of their classes.
        most: of most trained parameters.
        others: of those of which other than that is kept, by their first names; nothing of one that no optimizer has.
        note: what is assumed, where the module does not say it.
        left: the first names of parameters that no optimizer has.
        by_whole: names of the classes of those of which it is not known that they treat each element by itself.
        shaped: what is kept by the shapes of weights, of the parameters of which that can be found out.
    """

    name: str
    most: StateBytes
    others: Mapping[str, StateBytes] = field(default_factory=dict, hash=False)
    note: str = ""
    left: frozenset[str] = frozenset()
    by_whole: tuple[str, ...] = ()
    shaped: ShapedState = field(default_factory=lambda: ShapedState({}), hash=False, compare=False)

    def steps(self, name: str) -> bool:
        """Whether an optimizer has the parameter of that first name, be it trained or not."""
        return name not in self.left


_NOTHING, _AS_ADAM = StateBytes(0, 0), StateBytes(8, 4)


def optimizer_state(module: nn.Module) -> OptimizerState:
    """What the optimizers of ``module`` keep; what AdamW would where that can't be found out, which is noted.

    Example::

        assert optimizer_state(module_with_adam).most.by_element == 8
    """
    configure = getattr(module, "configure_optimizers", None)
    if not callable(configure):
        return OptimizerState("AdamW", _AS_ADAM, note="taken to be AdamW, as there is no configure_optimizers")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [*_optimizers(configure())]
    except Exception as error:  # the user's code
        note = f"taken to be AdamW, as configure_optimizers raises {told_with_line(error)}"
        return OptimizerState("AdamW", _AS_ADAM, note=note)
    return _of_each(module, found)


def _of_each(module: nn.Module, found: list[torch.optim.Optimizer]) -> OptimizerState:
    kept: dict[int, StateBytes] = {}
    unknown, shaped = set(), dict[int, tuple[torch.optim.Optimizer, Mapping[str, Any]]]()
    for optimizer in found:
        for group in optimizer.param_groups:
            options = _on_host(group)
            try:
                each, goes_by_shape = _probed(optimizer, options)
                shaped.update({id(p): (optimizer, options) for p in group["params"]} if goes_by_shape else {})
            except Exception:  # as of one that takes sparse gradients
                unknown.add(type(optimizer).__name__)
                each = _AS_ADAM
            kept.update((id(p), each) for p in group["params"])
    states = {name: kept.get(id(p), _NOTHING) for name, p in module.named_parameters() if p.requires_grad}
    counted = Counter(states.values()).most_common(1)
    most = counted[0][0] if counted else _NOTHING
    others = {name: each for name, each in states.items() if each != most}
    names = " and ".join(dict.fromkeys(type(one).__name__ for one in found)) or "none"
    note = "" if found else "configure_optimizers gives none"
    if unknown:
        note = f"the state of {' and '.join(sorted(unknown))} is taken to be as large as AdamW's"
    known = ShapedState({n: shaped[id(p)] for n, p in module.named_parameters() if n in states and id(p) in shaped})
    if shaped and not _can_be_told(known, module):
        known = ShapedState({})
        by_shape = " and ".join(sorted({type(optimizer).__name__ for optimizer, _ in shaped.values()}))
        note = f"not known: what {by_shape} keeps, which goes by the shapes of weights; counted as of one small weight"
    left = frozenset(name for name, p in module.named_parameters() if id(p) not in kept)
    by_whole = tuple(dict.fromkeys(type(one).__name__ for one in found if not _is_by_element(one)))
    return OptimizerState(names, most, others, note, left, by_whole, known)


def _is_by_element(optimizer: torch.optim.Optimizer) -> bool:
    return runs_torchs_step(optimizer, optimizer.step, BY_ELEMENT) and not has_step_hooks(optimizer)


def _can_be_told(states: ShapedState, module: nn.Module) -> bool:
    try:
        for name, p in module.named_parameters():
            if name in states.optimizers:
                states.nbytes(Parameter(name, tuple(p.shape), None, (), True, p.element_size()), p.dtype)
    except Exception:  # as of one whose step goes by values
        return False
    return True


def _on_host(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: x for name, x in group.items() if name not in _OF_DEVICE}, **dict.fromkeys(_OF_DEVICE, False)}


def _optimizers(given: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(given, torch.optim.Optimizer):
        yield given
    elif isinstance(given, Mapping):
        yield from _optimizers(given.get("optimizer"))
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _optimizers(one)


def _probed(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[StateBytes, bool]:
    """What is kept of a small weight, and whether that goes by more than how many elements it has."""
    weight = nn.Parameter(torch.ones(_SHAPE))
    state = state_after_a_step(optimizer, weight, group)
    tensors = [x for x in state.values() if isinstance(x, Tensor)]
    by_element = sum(x.nbytes for x in tensors if x.numel() == weight.numel()) / weight.numel()
    by_parameter = sum(x.nbytes for x in tensors if x.numel() != weight.numel())
    return StateBytes(by_element, by_parameter), any(x.numel() not in (1, weight.numel()) for x in tensors)
