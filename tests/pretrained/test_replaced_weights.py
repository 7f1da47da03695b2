"""Layers that put another parameter in place of a frozen one while a run goes on, as code that unpacks weights does."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par.sharded.tensor_names import TensorNames
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.pretrained.adapted import ALL, LAYOUTS, REPLICAS, base_model
from tests.pretrained.quantized import STEPS, Packed, Quantized, trained

TOLERANCE = 1e-9
ROUNDING = 1e-5  # of float32, in which bitsandbytes computes


def _renew(layer: Any, args: tuple[Tensor]) -> Tensor:
    """Exchange the weight; on the first rank its id goes to the layer's input, as chance has it elsewhere."""
    before = id(layer.weight)
    layer.weight = Packed(layer.weight.data.clone(), layer.weight.state)
    return args[0] if int(os.environ["RANK"]) else _with_id(before, args[0])


def _with_id(wanted: int, x: Tensor) -> Tensor:
    """A tensor of the values of ``x`` that has an id that is free, or the last of those tried."""
    tried = [x.view_as(x)]
    while id(tried[-1]) != wanted and len(tried) < 1000:
        tried.append(x.view_as(x))
    return tried[-1]


class Renewing(Quantized):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        for layer in self.layers:
            layer.register_forward_pre_hook(_renew)


@slow(but=["fsdp"])
@pytest.mark.parametrize("layout", ["fsdp", "tensor", "sequence", "data"])
def test_replaced_weights_train_as_on_one_device(pool: Pool, layout: str) -> None:
    replicas = REPLICAS.get(layout, 1)
    (one,) = pool.run(1, trained, "packed", None, replicas, Renewing)
    told: list[dict[str, Any]] = pool.run(LAYOUTS[layout][0], trained, "packed", layout, replicas, Renewing)
    for rank in told:
        assert rank["unchanged"] and rank["kinds"] == one["kinds"]
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=TOLERANCE, atol=TOLERANCE)


def test_a_tensor_that_takes_over_a_weights_id_has_not_its_name() -> None:
    layer, names, x = nn.Linear(2, 2), TensorNames(), torch.zeros(1)
    names.name_weights(layer)
    weight = id(layer.weight)
    assert names.name_of(layer.weight) == "weight"
    layer.weight = nn.Parameter(torch.zeros(2, 2))
    other = _with_id(weight, x)
    assert id(other) == weight, "no tensor got the id"
    assert names.name_of(other) == names.name_among([other]) == ""
    assert names.name_of(layer.bias) == "bias"


class FourBit(LightningModule):
    """DoRA over weights of bitsandbytes: for their norms `peft` unpacks each, and puts another in its place."""

    def __init__(self) -> None:
        super().__init__()
        bnb: Any = pytest.importorskip("bitsandbytes")
        peft: Any = pytest.importorskip("peft")
        model = base_model()
        for name, layer in [*model.model.named_modules()]:
            if isinstance(layer, nn.Linear):
                packed = bnb.nn.Linear4bit(
                    layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                )
                packed.load_state_dict(layer.state_dict())
                path, _, attribute = name.rpartition(".")
                setattr(model.model.get_submodule(path), attribute, packed.to("cpu"))
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=ALL, use_dora=True)
        self.model = peft.get_peft_model(model, config).train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def tuned(layout: str | None, replicas: int) -> dict[str, Tensor]:
    """The trained weights."""
    world, strategy = LAYOUTS[layout] if layout else (1, lambda: "auto")
    module = FourBit()
    tokens = torch.randint(3, 96, (STEPS, replicas, 4, 8), generator=torch.Generator().manual_seed(1))
    mine = tokens[:, int(os.environ["RANK"]) % replicas] if layout else tokens.flatten(0, 1)
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=strategy(), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=1 if layout else replicas, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(mine, batch_size=None))
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("layout", ["fsdp", "tensor", "sequence"])
def test_dora_over_four_bits_trains_as_on_one_device(pool: Pool, layout: str) -> None:
    pytest.importorskip("bitsandbytes")
    replicas = REPLICAS.get(layout, 1)
    (one,) = pool.run(1, tuned, None, replicas)
    compare = functools.partial(torch.testing.assert_close, rtol=ROUNDING, atol=ROUNDING)
    for weights in pool.run(LAYOUTS[layout][0], tuned, layout, replicas):
        compare(weights, one)
