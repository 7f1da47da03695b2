"""The operations that a `TorchDispatchMode` meets."""

from __future__ import annotations

import pytest
import torch

from lightning_par.private.operators import HOMES, Operator, schema_of, written_arguments


def test_an_operation_tells_what_it_takes_writes_and_returns() -> None:
    schema = schema_of(torch.ops.aten.add_.Tensor)
    assert schema.name == "aten::add_" and schema.is_mutable and not schema_of(torch.ops.aten.add.Tensor).is_mutable
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert written_arguments(torch.ops.aten.add_.Tensor) == [(0, "self")]
    assert written_arguments(torch.ops.aten.add.out) == [(3, "out")]
    assert written_arguments(torch.ops.aten._foreach_add_.List) == [(0, "self")]
    assert [str(value.type) for value in schema.returns] == ["Tensor"] and schema.returns[0].alias_info.is_write


@pytest.mark.parametrize("operation", [torch.ops.aten.add, torch.ops.aten.add.Tensor], ids=str)
def test_operations_are_told_from_functions(operation: object) -> None:
    assert operation.__module__.startswith(HOMES) and not str(torch.nn.functional.linear.__module__).startswith(HOMES)


def test_what_takes_functions_is_no_operator() -> None:
    assert isinstance(torch.ops.aten.add.Tensor, Operator) and not isinstance(torch.ops.higher_order.cond, Operator)
