"""Calls of attention are small here, and go the way of large ones, unless a test says otherwise."""

from __future__ import annotations

import pytest

from lightning_par.sequence import scheme


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values come by again in backward; not on the ranks of a pool, which are processes of their own."""
    monkeypatch.setattr(scheme, "SMALL", 0)
