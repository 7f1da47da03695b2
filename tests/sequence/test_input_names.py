"""Each tensor of a batch has a name in the start-up table, whatever the batch is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree

from lightning_par.trial.batch_tensors import names_of, tensors_of


@dataclass
class Extra:
    weights: Tensor


class Table:
    """As a `TensorDict`: a node that torch knows, and no mapping."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns


_pytree.register_pytree_node(Table, lambda x: ([*x.columns], None), lambda items, _: Table(*items))


@dataclass
class Checked:
    """As anomalib's batches are."""

    image: Tensor

    def __setattr__(self, name: str, value: object) -> None:
        assert isinstance(value, Tensor)
        super().__setattr__(name, value)


def test_names_are_as_many_as_tensors() -> None:
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    assert names_of({"a": x, "b": [y, (z,)]}) == ["a", "b[0]", "b[1][0]"]
    assert names_of(Extra(x)) == ["weights"] and names_of(Checked(x)) == ["image"]
    for batch in (Table(x, y), {"a": x, "table": Table(y, z)}, {"a": x, "extra": Extra(y)}, [Extra(x), Table(y)]):
        assert len(names_of(batch)) == len(tensors_of(batch))
    assert names_of({"a": x, "table": Table(y, z)}) == ["a", "[1]", "[2]"]
