"""What the metrics of torchmetrics keep to themselves."""

from __future__ import annotations

import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_par.private.metrics import ATTRIBUTES, has_states, is_collection, latest, with_latest


def test_metrics_and_collections_of_them_are_known() -> None:
    metric = SumMetric()
    assert has_states(metric) and not is_collection(metric) and not has_states(nn.Linear(1, 1))
    assert is_collection(MetricCollection([SumMetric(), MeanMetric()]))


def test_a_metric_has_these_attributes_besides_its_state() -> None:
    # `forward` is set where its calls are heard.
    assert vars(SumMetric()).keys() >= ATTRIBUTES - {"forward"} and not set(SumMetric().metric_state) & ATTRIBUTES


def test_what_a_metric_returned_last_is_known_and_can_be_another() -> None:
    metric = MeanMetric()
    metric(torch.tensor(1.0)), metric(torch.tensor(3.0))
    assert latest(metric) == 3 and metric.compute() == 2
    with with_latest(metric, torch.tensor(5.0)):
        assert latest(metric) == 5
    assert latest(metric) == 3
