"""Graph networks of `torch_geometric`, by its loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from tests.strangers.stranger import Stranger, with_trainer

GRAPHS, BATCH, FEATURES, CLASSES = 24, 4, 8, 3


def graphs() -> Any:
    g = torch.Generator().manual_seed(1)
    made = []
    for i in range(GRAPHS):
        nodes = 5 + i % 4
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=g)
        made.append(
            Data(
                x=torch.randn(nodes, FEATURES, generator=g, dtype=torch.float64),
                edge_index=torch.cat([edges, edges.flip(0)], dim=1),
                y=torch.tensor([i % CLASSES]),
                label=torch.randint(0, CLASSES, (nodes,), generator=g),
            )
        )
    return DataLoader(made, batch_size=BATCH)


class OfGraphs(LightningModule):
    """A class for each graph."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.head = network, nn.Linear(32, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.network(batch.x, batch.edge_index)
        logits = self.head(gnn.global_mean_pool(h, batch.batch))
        loss = F.cross_entropy(logits, batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        self.log("train_accuracy", (logits.argmax(-1) == batch.y).float().mean(), batch_size=batch.num_graphs)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)


class OfNodes(LightningModule):
    """A class for each node, known for some."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        out = self.network(data.x, data.edge_index)
        known = data.label > 0
        return F.cross_entropy(out[known], data.label[known])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Transformer(nn.Module):
    """`GPSConv`, as in the package's example."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 32)
        self.layers = nn.ModuleList(
            gnn.GPSConv(32, gnn.GINConv(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))), heads=4)
            for _ in range(2)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.up(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


def _stranger(make: Callable[[], LightningModule]) -> Stranger:
    return with_trainer(make, graphs, microbatches=1)  # graphs are joined in an object that no one sees into


_SIZES: dict[str, Any] = dict(in_channels=FEATURES, hidden_channels=32, num_layers=3)

STRANGERS: dict[str, Stranger] = {
    "gcn": _stranger(lambda: OfGraphs(gnn.GCN(**_SIZES, out_channels=32))),
    "gat": _stranger(lambda: OfGraphs(gnn.GAT(**_SIZES, out_channels=32, heads=4, v2=True))),
    "gat_nodes": _stranger(lambda: OfNodes(gnn.GAT(**_SIZES, out_channels=CLASSES, heads=4))),
    "sage_nodes": _stranger(lambda: OfNodes(gnn.GraphSAGE(**_SIZES, out_channels=CLASSES))),
    "gin": _stranger(lambda: OfGraphs(gnn.GIN(**_SIZES, out_channels=32, norm="batch_norm", jk="cat"))),
    "gps": _stranger(lambda: OfGraphs(Transformer())),
    "pna": _stranger(
        lambda: OfGraphs(
            gnn.PNA(
                **_SIZES,
                out_channels=32,
                aggregators=["mean", "max", "std"],
                scalers=["identity", "amplification"],
                deg=torch.tensor([0, 2, 4, 6, 4, 2, 1, 1, 1]),
            )
        )
    ),
}
