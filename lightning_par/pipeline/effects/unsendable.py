"""What a step stores, logs or returns and can't be sent to the other ranks of a pipeline, in words."""

from __future__ import annotations

from typing import Any

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.python_state.nested_tensors import tensors_in


def unsendable(place: str, value: Any, reason: str) -> str:
    """What to say of a ``value``.

    Args:
        place: where the step has left it.
        value: which all ranks need.
        reason: why it can't be sent.
    """
    away = next((x.origin.name for x in tensors_in(value) if isinstance(x, Elsewhere)), None)
    if away is None:
        return (
            f"{place} can't be sent to the other ranks of the pipeline: {reason}. All of them need what the step "
            "stores, logs and returns."
        )
    return (
        f"{place} is {away!r}, which another stage of the pipeline has: the step came to it by a value of the model, "
        "such as the loss, of which that stage can't know. Do so in on_train_batch_end, where all ranks see all "
        "weights and buffers, or use TensorParallelStrategy."
    )
