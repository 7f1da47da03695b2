"""What the metrics of torchmetrics keep to themselves."""

from __future__ import annotations

import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_par.private.metrics import ATTRIBUTES, has_states, is_collection, is_metric, latest, with_latest


def test_metrics_and_collections_of_them_are_known() -> None:
    metric = SumMetric()
    assert has_states(metric) and not is_collection(metric) and not has_states(nn.Linear(1, 1))
    several = MetricCollection([SumMetric(), MeanMetric()])
    assert is_collection(several)
    assert is_metric(metric) and is_metric(several)


def test_a_module_that_updates_and_computes_is_no_metric_for_that() -> None:
    class Several(nn.ModuleDict):  # which has an `update`
        def compute(self) -> int:
            return 0

    assert not is_metric(Several()) and not is_metric(nn.Linear(1, 1))


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
