"""What user code hands a logger's ``experiment``, as ``add_histogram(name, weight)``: one rank logs, all must read.

Lightning gives the other ranks an experiment whose methods do nothing. Where one is handed a tensor of which no rank
has all, these read it as the logging rank does, so that the values come there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.effects.held_loggers import refuse_within_layer
from lightning_par.private.trainer import dummy_experiment
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.strategies.namespace import Namespace

_PLAIN = (Tensor, nn.Parameter)


def patch(namespace: Namespace) -> Replacement:
    """Of what each method of such an experiment is."""
    return Replacement(dummy_experiment(namespace), "nop", _reading)


def _reading(plain: Any, use: Use) -> Any:
    def nop(self: Any, *args: Any, **kwargs: Any) -> Any:
        if use.on:
            refuse_within_layer()
            map_tensors(_read, (args, kwargs))
        return plain(self, *args, **kwargs)

    return nop


def _read(x: Tensor) -> Tensor:
    """Once, as `torch.utils.tensorboard` does, for which numpy has no bfloat16."""
    if type(x) not in _PLAIN:
        (x.to(torch.float16) if x.dtype == torch.bfloat16 else x).detach().cpu().numpy()
    return x
