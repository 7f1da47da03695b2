"""`Trainer(sync_batchnorm=True)`: batch norms whose statistics are those of all replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_par.mesh.axis import Axis

if TYPE_CHECKING:
    from lightning_par.strategies.namespace import Namespace

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def sync_batch_norm(model: nn.Module, layer_sync: Any, data: Axis, namespace: Namespace) -> nn.Module | None:
    """``model`` with synchronized batch norms; None where it stays as it is.

    Args:
        model: whole.
        layer_sync: the Trainer's plugin; None where the user asked for none.
        data: the axis of the replicas.
        namespace: whose Lightning the plugin is.
    """
    if layer_sync is None or data.size == 1 or not any(isinstance(m, _BATCH_NORMS) for m in model.modules()):
        return None
    if not isinstance(layer_sync, namespace.from_pytorch("plugins", "TorchSyncBatchNorm")):
        return layer_sync.apply(model)  # type: ignore[no-any-return]
    synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, process_group=data.group)
    return synced
