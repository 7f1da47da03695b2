"""A step of an optimizer on one parameter alone, beside its own, which shows what it keeps of such a parameter."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.optim.optimizers import adopt
from lightning_par.sharded.tensor import leaf

_NOT_OF_A_STEP = ("state", "param_groups", "step", "zero_grad", "_lightning_par")


def state_after_a_step(optimizer: Optimizer, p: Tensor, group: Mapping[str, Any]) -> dict[Any, Any]:
    """What an optimizer like ``optimizer`` keeps of ``p`` alone; it is left as it is, and ``p`` gets other values.

    Args:
        optimizer: of any class.
        p: any parameter.
        group: with the options of its step.

    Raises:
        Exception: whatever the step of the optimizer raises.

    Example::

        weight = nn.Parameter(torch.ones(2))
        assert state_after_a_step(AdamW([weight]), weight, {"lr": 0.1, ...}).keys() >= {"exp_avg", "exp_avg_sq"}
    """
    alike: Any = object.__new__(type(optimizer))
    options = {name: x for name, x in vars(optimizer).items() if name not in _NOT_OF_A_STEP}
    vars(alike).update({name: OrderedDict() if isinstance(x, OrderedDict) else x for name, x in options.items()})
    alike.__setstate__({"state": defaultdict(dict), "param_groups": [{**group, "params": [p]}]})
    held = leaf(p)
    held.grad = torch.empty_like(held)
    try:
        adopt(alike)
        alike.step()
    finally:
        held.grad = None
    return dict(alike.state.get(p, {}))
