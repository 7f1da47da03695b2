"""Batches in objects of a class of the user's, as the graphs of torch_geometric are, of another size each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, LayerPlacementStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import check, trained

SIZES = (5, 7, 5, 6)


class Graph:
    """Keeps its tensors by name in an object of its own, and may be called."""

    def __init__(self, **tensors: Tensor) -> None:
        self.store = SimpleNamespace()
        self.store.tensors = tensors
        self.store.marks = {torch.ones(2), torch.ones(3), torch.ones(4)}  # on each rank in an order of its own

    def __call__(self) -> list[str]:
        return [*self.store.tensors]

    def to(self, device: Any, **kwargs: Any) -> Graph:
        return Graph(**{name: x.to(device, **kwargs) for name, x in self.store.tensors.items()})

    def __getattr__(self, name: str) -> Any:
        if name == "store":
            raise AttributeError(name)
        return self.store.tensors[name]


def _graphs() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in SIZES:
        x, y = (torch.randn(size, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        edges = torch.randint(size, (2, 3 * size), generator=generator)
        found.append(Graph(x=x, edges=edges, y=y))
    return DataLoader(found, batch_size=None)  # type: ignore[arg-type]


class Mean(nn.Module):
    """Of what comes along edges."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return x + torch.zeros_like(x).index_add(0, edges[1], self.linear(x)[edges[0]]).tanh()


class ByName(Mean):
    def forward(self, x: Any, edges: Any) -> Any:  # type: ignore[override]
        return {"node": super().forward(x["node"], edges["to"])}


class OfAGraph(Mean):
    def forward(self, x: Tensor, graph: Any) -> Tensor:
        return super().forward(x, graph.edges)


def _given(model: Any, graph: Graph) -> Tensor:
    x = graph.x
    for layer in model.layers:
        x = layer(x, graph.edges)
    return x  # type: ignore[no-any-return]


def _by_name(model: Any, graph: Graph) -> Tensor:
    x = {"node": graph.x}
    for layer in model.layers:
        x = layer(x, {"to": graph.edges})
    return x["node"]


def _whole(model: Any, graph: Graph) -> Tensor:
    x = graph.x
    for layer in model.layers:
        x = layer(x, graph)
    return x  # type: ignore[no-any-return]


WAYS: dict[str, tuple[type[Mean], Callable[[Any, Graph], Tensor]]] = {
    "given": (Mean, _given),
    "by name": (ByName, _by_name),
    "whole": (OfAGraph, _whole),
}
LAYOUTS: dict[str, Callable[[], Any]] = {
    "pipeline": partial(HybridParallelStrategy, pipeline_parallel_size=2),
    "placement": partial(LayerPlacementStrategy, {"layers.0": 0, "layers.1": 1, "layers.2": 0, "head": 1}),
    "tensor": partial(HybridParallelStrategy, tensor_parallel_size=2),
}


class Graphs(LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer, self.walk = WAYS[way]
        self.layers, self.head = nn.ModuleList(layer() for _ in range(3)), nn.Linear(4, 4)

    def training_step(self, graph: Graph) -> Tensor:
        loss = F.mse_loss(self.head(self.walk(self, graph)), graph.y)
        self.log("loss", loss, batch_size=1)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def _fit(way: str, layout: str) -> Any:
    return trained(Graphs(way), _graphs(), LAYOUTS[layout], max_epochs=2)


@slow(but=["given-pipeline", "by name-placement", "whole-pipeline"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_graphs_of_other_sizes_are_one_devices(way: str, layout: str, pool: Pool) -> None:
    check(pool, _fit, way, layout)
