"""Caches of methods are found in the body of a class, with or without a function around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from lightning_par.python_state.cached_results import Remembered
from lightning_par.python_state.contents import CacheCell, MethodCacheCell
from lightning_par.python_state.method_caches import caches_of


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    cached = functools.lru_cache(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return cached(*args)

    return call


class _Tables:
    size = 3

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def plain(n: int) -> int:
        return n

    @_wrapped
    def wrapped(self, n: int) -> int:
        return n

    def other(self) -> int:
        return self.size


class _More(_Tables):
    pass


def test_caches_are_those_of_the_class_itself() -> None:
    assert [name for name, _ in caches_of(_Tables)] == ["plain", "wrapped"] and not caches_of(_More)


def test_what_a_run_that_is_undone_had_to_compute_is_computed_again() -> None:
    ((_, cache), _) = caches_of(_Tables)
    cell = MethodCacheCell("plain", cache)
    _Tables.plain(1)
    cell.restore()
    assert cache.cache_info().currsize == 0
    _Tables.plain(1)
    cell = MethodCacheCell("plain", cache)
    _Tables.plain(1)
    cell.restore()
    _Tables.plain(1)
    assert cache.cache_info().currsize == 1  # and what was remembered before the run is remembered still


@pytest.mark.parametrize("maxsize", [None, 4])
def test_results_that_came_since_go_and_others_stay(maxsize: int | None) -> None:
    cached = functools.lru_cache(maxsize=maxsize)(lambda x, y=0: [x, y])
    first = cached(1)
    remembered = Remembered(cached)
    assert remembered.is_known
    cached(2), cached(1, y=3)
    remembered.put_back()
    assert cached(1) is first and cached.cache_info().currsize == 1
    second = cached(2)
    remembered.note()
    cached(3)
    remembered.put_back()
    assert cached(2) is second and cached.cache_info().currsize == 2
    assert [cached(i) for i in range(9)] == [[i, 0] for i in range(9)]


def test_that_of_a_function_of_the_users_stays() -> None:
    """It is for values that are alike in all runs."""
    cache = functools.lru_cache(str)
    cell = CacheCell("str", cache)
    cache(1)
    cell.restore()
    assert cache.cache_info().currsize == 1
