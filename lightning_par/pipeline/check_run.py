"""What no pipeline can run, whatever its stages: refused before training starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning_par.strategies.entry_points import STEPS, fetches_itself

if TYPE_CHECKING:
    from lightning_par.strategies.namespace import Namespace


def check_run(trainer: Any, module: Any, namespace: Namespace, asker: str) -> None:
    """Refuse what no pipeline can run, whatever its stages.

    Raises:
        ValueError: the message says what, and what to use in place of ``asker``.
    """
    if trainer.state.fn.value == "fit":
        _refuse_pruning(trainer.callbacks, namespace, asker)
    for name in STEPS.values():
        refuse_fetching(module, name, asker)


def refuse_fetching(module: Any, step: str, asker: str) -> None:
    """Raises ValueError where the method ``step`` of ``module`` fetches its batches itself."""
    if fetches_itself(getattr(module, step, None)):
        raise ValueError(
            f"{step} takes `dataloader_iter`, of which it fetches its batches itself. Ranks that share the layers "
            f"run a step several times on one batch, so {asker} must have the batch before. Write `{step}(self, "
            "batch, batch_idx)`, or use TensorParallelStrategy."
        )


def _refuse_pruning(callbacks: Iterable[Any], namespace: Namespace, strategy: str) -> None:
    kind = namespace.from_pytorch("callbacks", "ModelPruning")
    if any(isinstance(callback, kind) for callback in callbacks):
        raise ValueError(
            "ModelPruning replaces weights by masked ones while it trains: parameters of other names, and masks that "
            f"each rank makes of its weights. Which rank holds which of them is settled before {strategy} trains. Use "
            "TensorParallelStrategy, or prune the trained model: torch.nn.utils.prune, after Trainer.fit."
        )
