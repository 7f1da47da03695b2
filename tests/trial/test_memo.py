"""What a memo holds, and when it forgets."""

from __future__ import annotations

import pytest

from lightning_par.trial.memo import Memo


def test_a_value_is_made_once() -> None:
    asked: list[str] = []

    def length(word: str) -> int:
        asked.append(word)
        return len(word)

    memo = Memo(length)
    assert [memo["a"], memo["ab"], memo["a"]] == [1, 2, 1] and asked == ["a", "ab"]


def test_a_memo_without_a_maker_is_told() -> None:
    memo: Memo[str, int] = Memo()
    with pytest.raises(KeyError):
        memo["a"]
    memo["a"] = 1
    assert memo["a"] == 1


def test_it_is_bounded() -> None:
    memo = Memo(str, most=3)
    for number in range(100):
        assert memo[number] == f"{number}" and len(memo) <= 3
    memo[99] = "other"  # what is known may be set anew
    assert len(memo) == 1 and memo[99] == "other"
