"""What all replicas have of one value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lightning_par.mesh.replicas import of_all_replicas


def test_in_a_dry_run_the_others_have_what_one_has() -> None:
    """Where a trial has values, as of a batch's size, code goes by them."""
    verbs = {"all_gather": lambda x, _: x.new_full((2, *x.shape), -(2**60)), "all_gather_object": lambda x, _: [x, x]}
    axis: Any = SimpleNamespace(dry=True, size=2, ranks=(0, 1), **verbs)
    assert of_all_replicas(torch.tensor([3, 4]), axis, sync_grads=False).tolist() == [[3, 4], [3, 4]]
