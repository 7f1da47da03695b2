"""What breaks NCCL's rules today, with the reason: an entry goes when the package no longer does it."""

from __future__ import annotations

from fnmatch import fnmatchcase

LAYOUTS: dict[str, str] = {}
"""Cells of `tests.gpu_rules.test_layouts` that must fail, under both kinds of queues."""

_TESTS: list[tuple[str, str]] = [
    ("*test_equality.py*[[]gru-*", "the fake device has no fused recurrent cell"),
    ("*test_equality.py*[[]hf_mixtral-*", "the fake device has no histogram of whole numbers"),
    ("*test_equality.py*encoder*residual*", "uneven tokens are summed by a reduce_scatter of unequal shapes"),
    ("*test_equality.py*[[]torch_encoder-*", "the fake device has no nested tensors, which evaluation makes"),
    ("*test_equality.py*[[]encoder_decoder-*", "the fake device has no nested tensors, which evaluation makes"),
    ("*test_equality.py*precision=16-mixed*", "the fake device has no softmax of halves that gives floats"),
]
"""Tests that may fail under ``--gpu-rules``, by patterns of their ids."""


def known(test: str) -> str | None:
    return next((reason for pattern, reason in _TESTS if fnmatchcase(test, pattern)), None)
