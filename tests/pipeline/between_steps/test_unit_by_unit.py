"""A step without a backward that goes by values of the model, on all ranks of a pipeline."""

from __future__ import annotations

from typing import Any

from torchmetrics import MeanMetric

from tests.helpers.pool import Pool
from tests.helpers.stages import trainer
from tests.helpers.surface import Net, loader, metrics


class Measures(Net):
    """Metrics that a layer's hook updates, or the step itself."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.within = within
        self.net[2].register_forward_hook(lambda m, args, output: self.measure(output) if within else None)

    def measure(self, output: Any) -> None:
        self.mean.update(output.detach().exp().mean())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self(batch[0])
        output = output + self(batch[0] + float(output.sum()))
        if not self.within:
            self.measure(output)
        self.log("val", output.sum())

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())


def measured(within: bool) -> Any:
    run = trainer(microbatches=1)
    try:
        run.validate(Measures(within), loader(8), verbose=False)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return {name: float(x) for name, x in metrics(run).items()}


def test_a_metric_of_the_step_is_one_devices(pool: Pool) -> None:
    assert pool.run(2, measured, False) == pool.run(1, measured, False) * 2


def test_a_metric_within_a_layer_that_not_all_ranks_run_is_refused(pool: Pool) -> None:
    for told in pool.run(2, measured, True):
        assert "test_unit_by_unit.py" in told and "a layer calls a MeanMetric" in told
