"""Models of `pytorch-forecasting`, made from its own data sets."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy
import pandas
import pytorch_forecasting as forecasting

from tests.strangers.stranger import Stranger, with_trainer

SERIES, STEPS, BATCH, PAST, FUTURE = 4, 40, 8, 12, 4


@cache
def _table() -> pandas.DataFrame:
    draws = numpy.random.default_rng(1)
    rows = [
        dict(
            series=f"s{i}",
            kind="odd" if i % 2 else "even",
            time=t,
            weekday=str(t % 7),
            price=float(draws.standard_normal()),
            value=float(numpy.sin(t / 5 + i) + 0.1 * draws.standard_normal() + 3),
        )
        for i in range(SERIES)
        for t in range(STEPS)
    ]
    return pandas.DataFrame(rows)


def _rich(least: int = PAST // 2, relative: bool = True) -> Any:
    return forecasting.TimeSeriesDataSet(
        _table(),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=PAST,
        min_encoder_length=least,
        max_prediction_length=FUTURE,
        static_categoricals=["series", "kind"],
        time_varying_known_categoricals=["weekday"],
        time_varying_known_reals=["time", "price"],
        time_varying_unknown_reals=["value"],
        add_relative_time_idx=relative,
        add_target_scales=True,
        add_encoder_length=True,
        target_normalizer=forecasting.GroupNormalizer(groups=["series"]),
    )


def _plain(**arguments: Any) -> Any:
    return forecasting.TimeSeriesDataSet(
        _table(),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=PAST,
        max_prediction_length=FUTURE,
        time_varying_unknown_reals=["value"],
        target_normalizer=forecasting.GroupNormalizer(groups=["series"]),
        **arguments,
    )


def _stranger(kind: Any, data: Any, **arguments: Any) -> Stranger:
    more: dict[str, Any] = {}
    for name in [name for name in arguments if name in ("refused", "microbatches", "transformer", "sequence")]:
        more[name] = arguments.pop(name)
    more.setdefault("microbatches", 1)  # a torchmetrics metric of the whole batch is the loss
    loss = arguments.pop("loss", forecasting.SMAPE)
    return with_trainer(
        lambda: kind.from_dataset(
            data(), learning_rate=0.01, optimizer="adam", log_interval=-1, loss=loss(), **arguments
        ),
        lambda: data().to_dataloader(train=True, batch_size=BATCH, shuffle=False, num_workers=0),
        **more,
    )


STRANGERS: dict[str, Stranger] = {
    "tft": _stranger(
        forecasting.TemporalFusionTransformer,
        _rich,
        hidden_size=16,
        attention_head_size=2,
        dropout=0.0,
        hidden_continuous_size=8,
        output_size=7,
        loss=forecasting.QuantileLoss,
    ),
    "deepar": _stranger(
        forecasting.DeepAR,
        _rich,
        hidden_size=16,
        rnn_layers=2,
        dropout=0.0,
        loss=forecasting.NormalDistributionLoss,
    ),
    "nbeats": _stranger(forecasting.NBeats, _plain, widths=[32, 64], backcast_loss_ratio=0.1, dropout=0.0),
    "nhits": _stranger(
        forecasting.NHiTS, lambda: _rich(PAST, relative=False), hidden_size=32, dropout=0.0, loss=forecasting.MAE
    ),
    "recurrent": _stranger(
        forecasting.RecurrentNetwork, _rich, cell_type="GRU", hidden_size=16, rnn_layers=2, dropout=0.0
    ),
    "mlp": _stranger(forecasting.DecoderMLP, _rich, hidden_size=32, dropout=0.0, loss=forecasting.SMAPE),
}
