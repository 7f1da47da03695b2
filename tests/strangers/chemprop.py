"""Message passing networks of `chemprop` over molecules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
from chemprop import data, models, nn
from lightning.pytorch import LightningModule

from tests.strangers.stranger import Stranger, with_trainer

BATCH = 4
SMILES = (
    "C CC CCC CCO CCN CC(=O)O c1ccccc1 c1ccccc1O CC(C)C CCOC CC#N C1CCCCC1 CCS CC(=O)N c1ccncc1 CCCl "
    "COC CN(C)C O=C=O CCF C=C C=CC C#C CC(C)O"
).split()


def molecules(tasks: int = 1) -> Any:
    draws = numpy.random.default_rng(1)
    targets = draws.standard_normal((len(SMILES), tasks))
    points = [data.MoleculeDatapoint.from_smi(smiles, y) for smiles, y in zip(SMILES, targets)]
    return data.build_dataloader(data.MoleculeDataset(points), batch_size=BATCH, shuffle=False, num_workers=0)


def classes() -> Any:
    draws = numpy.random.default_rng(1)
    targets = draws.integers(0, 2, (len(SMILES), 2)).astype(float)
    targets[::5, 0] = numpy.nan  # not measured
    points = [data.MoleculeDatapoint.from_smi(smiles, y) for smiles, y in zip(SMILES, targets)]
    return data.build_dataloader(data.MoleculeDataset(points), batch_size=BATCH, shuffle=False, num_workers=0)


def _stranger(make: Callable[[], LightningModule], loader: Callable[[], Any] = molecules, **more: Any) -> Stranger:
    return with_trainer(make, loader, **{"microbatches": 1, **more})  # graphs are joined


STRANGERS: dict[str, Stranger] = {
    "bond": _stranger(
        lambda: models.MPNN(nn.BondMessagePassing(d_h=32), nn.MeanAggregation(), nn.RegressionFFN(input_dim=32))
    ),
    "atom_norm": _stranger(
        lambda: models.MPNN(
            nn.AtomMessagePassing(d_h=32), nn.SumAggregation(), nn.RegressionFFN(input_dim=32), batch_norm=True
        ),
    ),
    "attentive": _stranger(
        lambda: models.MPNN(
            nn.BondMessagePassing(d_h=32),
            nn.AttentiveAggregation(output_size=32),
            nn.BinaryClassificationFFN(n_tasks=2, input_dim=32),
        ),
        classes,
    ),
    "evidential": _stranger(
        lambda: models.MPNN(
            nn.BondMessagePassing(d_h=32), nn.NormAggregation(), nn.EvidentialFFN(input_dim=32, n_layers=2)
        )
    ),
}
