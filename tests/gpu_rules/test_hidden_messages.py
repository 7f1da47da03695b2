"""Messages of a tensor axis that start within backward and are waited for later keep NCCL's rules."""

from __future__ import annotations

import pytest

from tests.gpu_rules.ranks import StrictPool
from tests.gpu_rules.report import Rules
from tests.helpers.slow import slow
from tests.tensor.test_hidden_messages import HOWS, train


@slow()
@pytest.mark.parametrize("how", ["plain", "residual", "checkpointed", "accumulated", "1f1b"])
@pytest.mark.parametrize("where", ["cuda", "one-queue"])
def test_hidden_messages_break_no_rule(request: pytest.FixtureRequest, where: str, how: str) -> None:
    pool: StrictPool = request.getfixturevalue("pool" if where == "cuda" else "strict_cpu")
    if where == "one-queue":
        pool.rules = Rules(queue="rank")
    results = pool.run(4 if "schedule" in HOWS[how] else 2, train, how, 0)
    assert pool.broken() == []
    assert all(apart for *_, apart in results)
