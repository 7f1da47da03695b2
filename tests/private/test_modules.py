"""What modules keep of their weights and buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_par.private.modules import forget_weak_references, is_persistent, renew_weak_references, weight_norms


def test_an_rnns_weights_can_be_swapped() -> None:
    rnn = nn.LSTM(2, 3)
    forget_weak_references(rnn)
    torch.utils.swap_tensors(rnn.weight_ih_l0, nn.Parameter(torch.zeros(12, 2)))
    renew_weak_references(rnn)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(rnn.weight_ih_l0, nn.Parameter(torch.zeros(12, 2)))


def test_the_older_weight_norms_of_a_layer_are_known() -> None:
    layer = nn.utils.weight_norm(nn.Linear(2, 2))
    (norm,) = weight_norms(layer)
    assert norm.name == "weight" and torch.equal(norm.compute_weight(layer), layer.weight)
    assert not weight_norms(nn.utils.spectral_norm(nn.Linear(2, 2)))


def test_a_buffer_says_whether_it_is_persistent() -> None:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("made", torch.zeros(1), persistent=False)
    assert [name for name in ("kept", "made") if is_persistent(module, name)] == list(module.state_dict())
