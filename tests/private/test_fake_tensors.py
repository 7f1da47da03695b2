"""Tensors without values."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par.planner.memory.live_bytes import LiveBytes
from lightning_par.private import fake_tensors
from lightning_par.private.fake_tensors import (
    WITHOUT_VALUE,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    active_fakes,
    fakes_as_tensors,
    makes_fakes,
    unset_fake_temporarily,
)
from tests.helpers.slow import slow
from tests.helpers.torch_version import VERSION


def test_shapes_and_devices_are_computed_without_values() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 3))
        made = x @ torch.ones(3, 4)
        with unset_fake_temporarily():
            assert torch.ones(2).tolist() == [1, 1]
    assert type(made) is FakeTensor and made.shape == (2, 4) and made.device.type == "cpu"


def test_what_values_decide_raises() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2))
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
        with pytest.raises(DynamicOutputShapeException):
            x.nonzero()


def test_an_operation_without_shapes_raises_and_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    library = torch.library.Library("lightning_par_test", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x.clone(), "CPU")
    with caplog.at_level(logging.DEBUG, fake_tensors.log.name), FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2))
        with pytest.raises(UnsupportedOperatorException):
            torch.ops.lightning_par_test.opaque(x)
    assert caplog.records and {record.name for record in caplog.records} == {fake_tensors.log.name}
    library._destroy()


def test_a_gradient_is_asked_for_by_what_makes_fakes_and_by_what_reads_code() -> None:
    asked: list[bool] = []

    class Asked(nn.Parameter):
        @property
        def grad(self) -> Any:  # type: ignore[override]
            asked.append(makes_fakes(sys._getframe(1)))
            return nn.Parameter.grad.__get__(self)  # type: ignore[union-attr]

    x = Asked(torch.ones(2))
    FakeTensorMode().from_tensor(x)
    assert asked and all(asked)
    asked.clear()
    assert x.grad is None and asked == [False]


def test_fakes_that_know_their_value_can_be_copied() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        known = torch.tensor(0.0)
        with pytest.raises((RuntimeError, AssertionError)):
            copy.deepcopy({"step": known})["step"].add_(1)
        with fakes_as_tensors(lambda x: None):
            twins = copy.deepcopy([known, known])
            assert twins[0] is twins[1] is not known and twins[0].shape == ()
    assert "__deepcopy__" not in vars(FakeTensor)


def test_the_data_of_a_fake_can_be_set_to_a_real_tensor() -> None:
    rows, forgotten = torch.zeros(2, 4).unbind(), list[Tensor]()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [nn.Parameter(torch.empty(4)) for _ in range(2)]
        with fakes_as_tensors(forgotten.append):
            for fake, row in zip(fakes, rows):
                fake.data = row
            assert fakes[0].shape == fakes[0].data.shape == (4,) and isinstance(fakes[0].data, FakeTensor)
            fakes[0].data = mode.from_tensor(torch.zeros(3))
            assert fakes[0].shape == (3,)
    assert len(forgotten) == 2 and "data" not in vars(FakeTensor)


def test_an_address_of_a_fake_can_be_read() -> None:
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.ones(2).data_ptr() == 0


def test_a_value_that_a_fake_has_not_is_told_by_these() -> None:
    assert {DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException} == {*WITHOUT_VALUE}
    with FakeTensorMode() as mode, pytest.raises(WITHOUT_VALUE):
        mode.from_tensor(torch.ones(2)).sum().item()


def test_which_mode_makes_fakes_now_is_known() -> None:
    assert active_fakes() is None
    with FakeTensorMode() as mode:
        assert active_fakes() is mode
        with unset_fake_temporarily():
            assert active_fakes() is None


LSTMS: list[dict[str, Any]] = [
    {}, {"bidirectional": True, "num_layers": 2, "batch_first": True}, {"bias": False, "dtype": torch.bfloat16},
    {"proj_size": 3},
]  # fmt: skip


@slow("True-{'proj_size': 3}")
@pytest.mark.parametrize("options", LSTMS, ids=str)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_an_lstm_holds_as_much_as_on_real_tensors(options: dict[str, Any], trains: bool) -> None:
    if VERSION < (2, 12) and trains and "dtype" in options:
        pytest.skip("torch 2.11 holds 3 % more in the backward of an LSTM of bfloat16")

    def held() -> tuple[int, int]:
        lstm = nn.LSTM(8, 20, **options)
        x = torch.zeros(30, 4, 8, dtype=options.get("dtype"))
        lstm(x)[0].sum().backward()  # gradients are there
        with LiveBytes() as live, torch.set_grad_enabled(trains):
            out = lstm(x)[0]
            kept = live.now
            if trains:
                out.sum().backward()
        return live.peak, kept

    real = held()
    with FakeTensorMode():
        assert held() == real


SHAPED: dict[str, Any] = {
    "linear": lambda x: F.linear(x, x[:, 0], x[:, 0, 0]),
    "linear of rows": lambda x: F.linear(x[0], x[:, 1], x[:, 0, 0]),
    "linear of columns": lambda x: F.linear(x[0].t().contiguous().t(), x[:, 1], x[0, 0, :1].expand(5)),
    "sum": lambda x: x.sum(),
    "sum of integers": lambda x: (x > 0).sum(),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.transpose(0, 2).log_softmax(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(5, 4, dtype=torch.long)),
    "cross_entropy of rows": lambda x: F.cross_entropy(x[0], torch.arange(3), x[0, 0].detach(), reduction="sum"),
    "cross_entropy of each row": lambda x: F.cross_entropy(x[0], torch.arange(3), reduction="none"),
    "mse_loss": lambda x: F.mse_loss(x, x.detach()),
    "mse_loss of each": lambda x: F.mse_loss(x.detach().mT, x.detach().mT, reduction="none"),
    "gelu": lambda x: F.gelu(x.transpose(0, 1)),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x.transpose(1, 2)),
    "tanh": lambda x: x.transpose(0, 2).tanh(),
    "sigmoid": lambda x: x.expand(2, 5, 3, 4).sigmoid(),
    "relu": lambda x: x.transpose(0, 1).relu(),
}


def _forms(call: Any, x: torch.Tensor) -> list[Any]:
    x.requires_grad_()
    y = call(x)
    found = [y]
    if y.requires_grad:
        found += torch.autograd.grad(y, x, torch.ones_like(y))
    return [(x.shape, x.stride(), x.dtype, x.device) for x in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPED)
def test_kernels_that_say_what_shapes_come_of_them_are_asked(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which torch composes of others; what comes of them is as on real tensors."""
    real = _forms(SHAPED[name], torch.ones(5, 3, 4, dtype=dtype))
    FakeTensorMode.cache_clear()
    composed = {func: _never for func in fake_tensors._SHAPED if func in torch._decomp.decomposition_table}
    assert len(composed) == len(fake_tensors._SHAPED)
    monkeypatch.setattr(torch._decomp, "decomposition_table", {**torch._decomp.decomposition_table, **composed})
    with FakeTensorMode():
        assert _forms(SHAPED[name], torch.ones(5, 3, 4, dtype=dtype)) == real


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("is composed")


def test_memory_that_a_tensor_was_set_to_lie_in_is_freed() -> None:
    with FakeTensorMode(), LiveBytes() as live:
        x, lying = torch.zeros(100), torch.zeros(0)
        lying.set_(x.untyped_storage(), 0, (50,), (1,))  # type: ignore[call-overload]
        del x
        assert live.now == 400
        del lying
        assert live.now == 0
