"""How many devices there are, on a node and in all, as user code gets them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightning_par.mesh.layout import Groups
from lightning_par.strategies.namespace import Namespace
from lightning_par.strategies.rank_numbers import Count, in_users_hook

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object


class DeviceCountsMixin(_Base):
    """Counts of a strategy: in the user's hooks, where they go into results, of replicas; see `rank_numbers.Count`."""

    namespace: Namespace
    _groups: Groups | None = None
    _nodes = 1

    @property
    def num_nodes(self) -> int:
        return Count(self._nodes_of_replicas(), self._nodes) if self._are_replicas_meant() else self._nodes

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        self._nodes = nodes

    @property
    def num_processes(self) -> int:
        """On this node."""
        processes = len(self.parallel_devices or [])
        if not self._are_replicas_meant():
            return processes
        assert self._groups is not None
        return Count(self._groups.data.size // self._nodes_of_replicas(), processes)

    def _nodes_of_replicas(self) -> int:
        """Nodes with as many replicas on each of them, where a replica may take several: user code multiplies both."""
        assert self._groups is not None
        return math.gcd(self._groups.data.size, self._nodes)

    def _are_replicas_meant(self) -> bool:
        return self._groups is not None and self._groups.replica.size > 1 and in_users_hook(self.namespace)


def devices_of(trainer: Any) -> int | None:
    """What ``trainer.num_devices`` is where a strategy of ours runs it."""
    strategy = trainer.strategy
    return strategy.num_processes if isinstance(strategy, DeviceCountsMixin) else None
