"""Who looks at a weight or a gradient between two steps: user code, or torch's, Lightning's and our own."""

from __future__ import annotations

import types

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.private.graph import in_backward
from lightning_par.private.module_calls import METHODS
from lightning_par.sharded.who_reads import is_inner

_OURS = (
    "lightning_par.",
    *("torch.optim.", "torch.nn.modules.module", "torch.serialization", "torch.distributed"),
    *("lightning.pytorch.strategies", "pytorch_lightning.strategies"),
    *("lightning.fabric.utilities.optimizer", "lightning_fabric.utilities.optimizer"),
)
_BETWEEN = (
    *(Elsewhere.__module__, f"{__package__}.gradients.remote_gradient", f"{__package__}.optim.optimizer_state"),
    *(
        f"{__package__}.weights.{name}"
        for name in ("remote_weight", "weight_functions", "weight_reads", "weight_writes")
    ),
    *("lightning_par.pipeline.run.located", f"{__package__}.units.unit_by_unit"),  # a step's mode
    "lightning_par.pipeline.run.unit_calls",
    *(
        "lightning_par.sharded.patches.backward",
        "lightning_par.sharded.patches.tensor_data",
        "lightning_par.sharded.patches.shared_arrays",
        "lightning_par.sharded.tensor",
        "lightning_par.fsdp.stored_parameter",
        "lightning_par.private.fake_tensors",
    ),  # of ``x.data`` and ``x.numpy()``, for whoever wrote that
)
_TRANSPARENT = ("torch", "copy", "collections")
# What reads for those who call it between steps.
_USERS = (
    *("torch.optim.swa_utils", "lightning_par.sharded.patches.dummy_experiments"),
    f"{__package__}.weights.weight_updates",
)
# What torch does for a caller: a module's call, where it is no unit, as a copy of one is, and what is held.
_CALLS = {
    "torch.nn.modules.module": METHODS,
    "torch.optim.optimizer": frozenset(("state_dict", "<dictcomp>")),
}  # fmt: skip


def user_of(frame: types.FrameType | None) -> str | None:
    """The module whose code called a function, by itself or by torch's; None where that is not for user code."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        calls = frame.f_code.co_name in _CALLS.get(module, ())
        if module.startswith(_OURS) and module not in (*_BETWEEN, *_USERS) and not calls:
            return None
        if module not in _BETWEEN and module.partition(".")[0] not in _TRANSPARENT:
            return str(module)
        frame = frame.f_back
    return None


def sees_gradients(frame: types.FrameType) -> bool:
    """Whether the code that runs in ``frame`` is to see the gradients of all stages."""
    if in_backward():  # hooks of a parameter run where it is
        return False
    return not is_inner(frame)
