from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_par.private import recurrent_kernels
from lightning_par.private.fake_tensors import FakeTensorMode
from lightning_par.private.operators import schema_of
from lightning_par.private.recurrent_kernels import layer, workspace_bytes


def arguments(steps: int, samples: int, features: int, hidden: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    shapes = [
        (steps, samples, features), (4 * hidden, features), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,),
        (samples, hidden), (samples, hidden),
    ]  # fmt: skip
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    return [*tensors, False, [], 2, hidden, 1, True, False, False, True]


def test_the_kernel_is_what_it_was() -> None:
    schema = str(schema_of(layer))
    assert schema[schema.index("(") :] == (
        "(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx_, Tensor cx_, "
        "bool reverse, SymInt[] batch_sizes, int mode, SymInt hidden_size, int num_layers, bool has_biases, "
        "bool bidirectional, bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)"
    ).replace("SymInt", "int")


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (7, 3, 5, 9), (40, 8, 33, 65), (300, 1, 64, 16), (2, 30, 256, 200)])
def test_a_workspace_of_a_small_layer_is_known_to_the_byte(sizes: tuple[int, int, int, int]) -> None:
    args = arguments(*sizes)
    with torch.no_grad():
        assert workspace_bytes(args) == _made(args)


@pytest.mark.parametrize("sizes", [(20, 16, 512, 512), (3000, 2, 1, 64), (5, 7, 3000, 100), (60, 8, 300, 500)])
def test_a_workspace_of_a_large_layer_is_known_within_a_few_percent(sizes: tuple[int, int, int, int]) -> None:
    args = arguments(*sizes)
    assert workspace_bytes(args) == pytest.approx(_made(args), rel=0.05)


@pytest.mark.parametrize(
    "sizes", [(1000, 512, 16384, 16384), (100_000, 1, 4, 4), (3, 100_000, 1, 1), (128, 64, 200_000, 512)]
)
def test_no_large_layer_is_run_for_it(sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def noted(*args: Any) -> Any:
        ran.append(args)
        return layer(*args)

    monkeypatch.setattr(recurrent_kernels, "layer", noted)
    with FakeTensorMode():
        args = arguments(*sizes)
    found = workspace_bytes(args)
    (given,) = ran
    assert found > 40 * sizes[0] * sizes[1] * sizes[3]
    assert sum(x.nbytes for x in given[:7]) < 6e6 and _made(given) < 4e7


def _made(args: Any) -> int:
    with torch.enable_grad():
        return int(layer(*args)[3].numel())
