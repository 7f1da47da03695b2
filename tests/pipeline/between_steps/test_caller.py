"""Whose code looks at a weight between two steps."""

from __future__ import annotations

from importlib import import_module

import pytest

from lightning_par.pipeline.between_steps import caller


@pytest.mark.parametrize("name", [*caller._BETWEEN, *caller._USERS])
def test_a_module_that_is_named_is_there(name: str) -> None:
    assert import_module(name).__name__ == name
