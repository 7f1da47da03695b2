"""A plan for GPUs knows what their kernels keep of a function, not what a CPU keeps that has none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_par import plan
from tests.helpers.slow import long

B, T, C, HEADS = 4, 256, 64, 4


class ByHand(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.into, self.out, self.dropout = nn.Linear(C, 3 * C), nn.Linear(C, C), dropout

    def forward(self, x_BTC: Tensor) -> Tensor:
        q, k, v = (y.reshape(B, T, HEADS, -1).transpose(1, 2) for y in self.into(x_BTC).chunk(3, -1))
        y_BHTD = F.scaled_dot_product_attention(q, k, v, None, self.dropout)
        out: Tensor = self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))
        return out


class Attends(LightningModule):
    """Its attention is written ``by_hand``, is torch's, or is torch's and gives its weights."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        self.attention = (
            ByHand(dropout) if kind == "by_hand" else nn.MultiheadAttention(C, HEADS, dropout, batch_first=True)
        )

    def training_step(self, x: Tensor, i: int) -> Tensor:
        if self.kind == "by_hand":
            return self.attention(x).square().mean()
        return self.attention(x, x, x, need_weights=self.kind == "weights")[0].square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _activations(module: LightningModule, precision: str = "32-true") -> int:
    layout = {"data_parallel_size": 1}
    found = plan(module, torch.randn(B, T, C), "8xH100", devices=1, layout=layout, precision=precision)
    return int(found.as_dict()["layouts"][0]["ranks"][0]["activations"])


@long("0.0")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_keeps_what_fused_attention_keeps(dropout: float) -> None:
    scores = B * HEADS * T * T * 4
    by_hand = _activations(Attends("by_hand", dropout))
    assert by_hand == _activations(Attends("torch", dropout)) == _activations(Attends("by_hand", 0.0)) < scores
    assert _activations(Attends("weights", dropout)) > scores  # which it gives


class Normed(LightningModule):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(kind(C), nn.Linear(C, C)) for _ in range(4))

    def training_step(self, x: Tensor, i: int) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

    configure_optimizers = Attends.configure_optimizers


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_a_norm_keeps_its_input_and_a_number_for_each_token(precision: str) -> None:
    by_layer, by_root = (_activations(Normed(kind), precision) for kind in (nn.LayerNorm, nn.RMSNorm))
    assert by_layer == by_root


class Written(LightningModule):
    """Attention that is written out, of which only the weights' size counts."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(C, 2 * C)

    def training_step(self, x_BTC: Tensor, i: int) -> Tensor:
        q, k = self.into(x_BTC).chunk(2, -1)
        weights_BTT = (q @ k.transpose(-1, -2)).softmax(-1)
        return (weights_BTT @ k).sum()

    configure_optimizers = Attends.configure_optimizers


def test_autocast_runs_softmax_in_single_precision_as_a_gpu_does() -> None:
    pairs = B * T * T
    more = _activations(Written(), "bf16-mixed") - _activations(Written(), "bf16-true")
    assert more >= pairs * 4  # its result, and a copy of that for the product


def test_functions_that_run_one_by_one_keep_on_a_gpu_what_its_kernels_keep() -> None:
    layout, scores = {"data_parallel_size": 1}, B * HEADS * T * T * 4
    module = Attends("by_hand", 0.1)
    found = plan(module, torch.randn(B, T, C), "8xH100", devices=1, layout=layout, eager=True)
    assert found.as_dict()["layouts"][0]["ranks"][0]["activations"] < scores
