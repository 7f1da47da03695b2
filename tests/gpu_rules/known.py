"""What breaks NCCL's rules today, with the reason: an entry goes when the package no longer does it."""

from __future__ import annotations

from fnmatch import fnmatchcase

_ORDERS = "activations and gradients go by communicators of their own, in opposite orders on two ranks"
_COURIER = "what a rank sends to be saved goes message by message on the communicator of the world"
_RING = "the messages of a ring go one by one on the communicator of the whole axis"

LAYOUTS: dict[str, str] = {
    **dict.fromkeys("gpipe 1f1b interleaved izb zbv placement 1f1b4 interleaved4 zbv4".split(), _ORDERS),
    **dict.fromkeys("pipe_tensor pipe_ring fsdp_pipe fsdp_pipe_reshard data_zbv".split(), _ORDERS),
    "ring4": _RING,
}
"""Cells of `tests.gpu_rules.test_layouts` that must fail, under both kinds of queues."""

_TESTS: list[tuple[str, str]] = [
    ("*test_equality.py*pp[24]*", _ORDERS),
    ("*test_draws_of_a_pipeline*", _ORDERS),
    ("*test_hybrid_equality.py*pipeline=*", _ORDERS),
    ("*test_hybrid_equality.py*", _COURIER),
    ("*test_features.py*pipeline*", _ORDERS),
    ("*test_features.py*placement*", _ORDERS),
    ("*pipeline/test_surface.py*", _ORDERS),
    ("*test_equality.py*sp4-ring*", _RING),
    ("*test_equality.py*precision=16-mixed*", "the fake device has no softmax of halves that gives floats"),
]
"""Tests that may fail under ``--gpu-rules``, by patterns of their ids."""


def known(test: str) -> str | None:
    return next((reason for pattern, reason in _TESTS if fnmatchcase(test, pattern)), None)
