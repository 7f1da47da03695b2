"""Models of `scvi-tools`, trained by their own `train`; their noise is fixed: stages draw from their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import anndata
import numpy
import pandas
import scvi
import torch
from torch import Tensor

from tests.strangers.stranger import STEPS, Arguments, Stranger

CELLS, GENES, BATCH = 48, 24, 16


def cells() -> Any:
    draws = numpy.random.default_rng(1)
    counts = draws.poisson(3.0, (CELLS, GENES)).astype("float32")
    labels = pandas.DataFrame(
        {"batch": [f"b{i % 2}" for i in range(CELLS)], "labels": [f"l{i % 3}" for i in range(CELLS)]},
        index=[f"cell{i}" for i in range(CELLS)],
    )
    return anndata.AnnData(counts, obs=labels, var=pandas.DataFrame(index=[f"gene{i}" for i in range(GENES)]))


def _noise(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, shape.numel(), dtype=dtype, device=device).reshape(shape)


def _stranger(make: Callable[[], Any], steps_an_epoch: int = CELLS // BATCH, **more: Any) -> Stranger:
    def fit(arguments: Arguments) -> None:
        for name in ("num_sanity_val_steps", "max_steps", "devices"):
            given = arguments.pop(name)
        devices = given  # the package's own arguments go by these names
        with mock.patch("torch.distributions.normal._standard_normal", _noise):
            make().train(
                max_epochs=-(-STEPS // steps_an_epoch),
                train_size=1.0,
                shuffle_set_split=False,
                batch_size=BATCH,
                early_stopping=False,
                devices=devices,
                **arguments,
            )

    return Stranger(fit, own_loop=True, microbatches=1, **more)


def _scvi(**arguments: Any) -> Any:
    adata = cells()
    scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
    return scvi.model.SCVI(adata, n_hidden=32, n_latent=4, dropout_rate=0.0, **arguments)


def _linear() -> Any:
    adata = cells()
    scvi.model.LinearSCVI.setup_anndata(adata)
    return scvi.model.LinearSCVI(adata, n_hidden=32, n_latent=4, dropout_rate=0.0)


def _stereoscope() -> Any:
    adata = cells()
    scvi.external.RNAStereoscope.setup_anndata(adata, labels_key="labels")
    return scvi.external.RNAStereoscope(adata)


def _peak() -> Any:
    adata = cells()
    adata.X = (adata.X > 3).astype("float32")
    scvi.model.PEAKVI.setup_anndata(adata, batch_key="batch")
    return scvi.model.PEAKVI(adata, n_hidden=32, n_latent=4, dropout_rate=0.0)


STRANGERS: dict[str, Stranger] = {
    "scvi": _stranger(_scvi),
    "scvi_norm": _stranger(lambda: _scvi(use_layer_norm="both", use_batch_norm="none")),
    "linear": _stranger(_linear),
    "peak": _stranger(_peak),
    "stereoscope": _stranger(_stereoscope, refused={"pipeline_parallel": "TrainingPlan has only 1 modules"}),
}
