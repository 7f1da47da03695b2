"""What breaks NCCL's rules today, with the reason: an entry goes when the package no longer does it."""

from __future__ import annotations

from fnmatch import fnmatchcase

LAYOUTS: dict[str, str] = {}
"""Cells of `tests.gpu_rules.test_layouts` that must fail, under both kinds of queues."""

_TESTS: list[tuple[str, str]] = []
"""Tests that may fail under ``--gpu-rules``, by patterns of their ids."""


def known(test: str) -> str | None:
    return next((reason for pattern, reason in _TESTS if fnmatchcase(test, pattern)), None)
