"""Models of `neuralforecast`, fitted by its own API, which makes the Trainer and the loader."""

from __future__ import annotations

from functools import partial
from typing import Any

import neuralforecast
import numpy
import pandas
from neuralforecast import models
from neuralforecast.losses import pytorch as losses

from tests.strangers.stranger import Arguments, Stranger

SERIES, LENGTH, PAST, FUTURE, WINDOWS = 6, 60, 12, 4, 8


def table() -> pandas.DataFrame:
    draws = numpy.random.default_rng(1)
    times = pandas.date_range("2020-01-01", periods=LENGTH, freq="D")
    parts = [
        pandas.DataFrame(
            {
                "unique_id": f"s{i}",
                "ds": times,
                "y": numpy.sin(numpy.arange(LENGTH) / 5 + i) + 0.1 * draws.standard_normal(LENGTH),
            }
        )
        for i in range(SERIES)
    ]
    return pandas.concat(parts, ignore_index=True)


def _stranger(
    kind: Any,
    transformer: bool = False,
    sequence: bool = False,
    loss: Any = losses.MAE,
    microbatches: int = SERIES,  # of which windows are drawn
    **arguments: Any,
) -> Stranger:
    def fit(given: Arguments) -> None:
        if kind.MULTIVARIATE:
            arguments.setdefault("n_series", SERIES)
        model = kind(
            h=FUTURE,
            input_size=PAST,
            batch_size=SERIES,
            windows_batch_size=WINDOWS,
            learning_rate=0.01,
            loss=loss(),
            scaler_type="standard",
            val_check_steps=100,
            **arguments,
            **given,
        )
        forecast = neuralforecast.NeuralForecast(models=[model], freq="D")
        forecast.fit(df=table())

    return Stranger(
        fit,
        pytorch="pytorch_lightning",
        own_loop=True,
        own_parts=kind.MULTIVARIATE,
        transformer=transformer,
        sequence=sequence,
        microbatches=microbatches,
    )


STRANGERS: dict[str, Stranger] = {
    "nhits": _stranger(models.NHITS, mlp_units=3 * [[32, 32]]),
    "nbeats": _stranger(models.NBEATS, mlp_units=3 * [[32, 32]]),
    "mlp": _stranger(models.MLP, hidden_size=32, num_layers=2),
    # Recurrent in most of its weights, whatever its name.
    "tft": _stranger(models.TFT, hidden_size=16, n_head=4, dropout=0.0, attn_dropout=0.0),
    "patchtst": _stranger(
        models.PatchTST,
        microbatches=1,  # which of its windows' patches belong to which sample is not seen
        hidden_size=16,
        n_heads=4,
        encoder_layers=2,
        linear_hidden_size=32,
        patch_len=4,
        stride=4,
        dropout=0.0,
        fc_dropout=0.0,
        head_dropout=0.0,
        attn_dropout=0.0,
        transformer=True,
    ),
    "vanilla": _stranger(
        models.VanillaTransformer, hidden_size=16, n_head=4, conv_hidden_size=32, dropout=0.0, transformer=True
    ),
    "itransformer": _stranger(
        models.iTransformer,
        microbatches=1,  # series attend to one another
        hidden_size=16,
        n_heads=4,
        e_layers=2,
        d_ff=32,
        dropout=0.0,
        transformer=True,
    ),
    "lstm": _stranger(models.LSTM, encoder_hidden_size=16, decoder_hidden_size=16),
    "tsmixer": _stranger(models.TSMixer, microbatches=1, n_block=2, ff_dim=16, dropout=0.0),  # BatchNorm
    "deepar": _stranger(
        models.DeepAR,
        lstm_hidden_size=16,
        lstm_dropout=0.0,
        loss=partial(losses.DistributionLoss, "Normal"),
    ),
    "tcn": _stranger(models.TCN, encoder_hidden_size=16, decoder_hidden_size=16),
}
