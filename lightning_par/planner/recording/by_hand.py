"""What a Trainer refuses of a module that runs backward and its optimizers itself, and what its step clips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_par.trial.step import optimizes_by_hand


def hear_clips(copy: nn.Module, tell: Callable[[Any, Any], None]) -> None:
    """``tell`` is called with the bound and the algorithm of what ``copy``, a trial's LightningModule, clips by itself
    from now on."""

    def clip_gradients(optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        tell(gradient_clip_val, gradient_clip_algorithm)

    if optimizes_by_hand(copy):
        vars(copy).update(clip_gradients=clip_gradients)


def refuse_of_trainer(module: nn.Module, clip: str = "", accumulated: int = 1) -> None:
    """
    Args:
        module: the user's.
        clip: of gradients by the Trainer; empty: none.
        accumulated: training steps for each step of the optimizer.

    Raises:
        ValueError: ``module`` optimizes by hand, and a Trainer then neither clips nor accumulates.
    """
    if not optimizes_by_hand(module):
        return
    begin = f"{type(module).__name__} optimizes by hand (automatic_optimization=False), for which a Trainer takes no "
    if clip:
        raise ValueError(f"{begin}gradient_clip_val. Leave it out, and call self.clip_gradients in training_step.")
    if accumulated > 1:
        raise ValueError(
            f"{begin}accumulate_grad_batches: each training_step is a step of its own, and {accumulated} of them are "
            "asked for. Ask for as many samples a step as one batch of each replica has."
        )
