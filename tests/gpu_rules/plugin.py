"""``pytest --gpu-rules=communicator`` or ``=rank``: ranks of tests have fake CUDA devices and the strict group.

``--gpu-rules=shared``: they share one real device instead; `tests.gpu_rules.shared`.

Each test that asks for the fixture `pool` then also fails where a rule was broken, by one of its runs.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_rules import build
from tests.gpu_rules.report import Rules

_OPTION = "--gpu-rules"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _OPTION,
        choices=("communicator", "rank", "shared"),
        help="fake CUDA and NCCL's rules, queues by what is said; or one real device for all ranks",
    )


def strict_pool(config: pytest.Config) -> Any:
    """The pool that the option asks for; None without it."""
    queue: Any = config.getoption(_OPTION)
    if queue is None:
        return None
    from tests.gpu_rules.ranks import StrictPool

    if queue == "shared":
        return StrictPool("shared")
    why = build.missing()
    if why is not None:
        pytest.skip(why)
    return StrictPool("cuda", Rules(queue=queue))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    pool = getattr(item, "funcargs", {}).get("pool")
    # The harness's own tests, beside this file, break rules to see that it is told.
    if item.config.getoption(_OPTION) and pool is not None and item.path.parent != Path(__file__).parent:
        broken = pool.broken_since()
        assert not broken, "rules were broken:\n" + "\n".join(broken)
    return result
