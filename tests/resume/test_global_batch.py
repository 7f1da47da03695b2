"""Which batches a step has on other numbers of replicas: by arithmetic, without a process."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from lightning_par.resume.global_batch import GlobalBatch
from lightning_par.resume.progress import batches_of_epoch, is_closed_within
from lightning_par.resume.regrouped import Regrouped, counted_anew, regrouped
from lightning_par.resume.replica_batches import ReplicaBatches

SIZES = [(replicas, accumulate) for replicas in (1, 2, 3, 4) for accumulate in (1, 2, 3, 4, 6)]


@pytest.mark.parametrize(("replicas", "accumulate"), SIZES)
@pytest.mark.parametrize("stream", [None, 5, 12])
def test_replicas_share_the_batches_of_each_step(replicas: int, accumulate: int, stream: int | None) -> None:
    batch = GlobalBatch(replicas, accumulate)
    for size in (n for n in range(1, batch.size + 1) if batch.size % n == 0):
        last = stream or 3 * accumulate
        loaders = {number: [(number, i) for i in range(last)] for number in range(replicas)}
        try:
            count = batch.batches_on(size, last)
        except ValueError as error:
            assert last % accumulate * replicas % size and "can't share" in str(error)
            continue
        window = batch.accumulate_on(size)
        shares = []
        for index in range(size):
            mine = {n % replicas for n in range(index, batch.size, size)}
            streams = {number: loader for number, loader in loaders.items() if number in mine}
            loader = ReplicaBatches(streams, batch, size, index)
            assert len(loader) == count
            shares.append([*loader])
            assert len(shares[-1]) == count
        for step in range(-(-last // accumulate)):
            met = sorted(x for share in shares for x in share[step * window : (step + 1) * window])
            span = range(step * accumulate, min(last, (step + 1) * accumulate))
            assert met == sorted((number, i) for number in range(replicas) for i in span)


def test_one_device_meets_the_batches_stream_by_stream() -> None:
    loader = ReplicaBatches({0: "ace", 1: "bdf"}, GlobalBatch(2, 2), 1, 0)
    assert [*loader] == ["a", "b", "c", "d", "e", "f"]
    assert [*ReplicaBatches({0: "ace", 1: "bdf"}, GlobalBatch(2, 2), 1, 0, limit=2)] == ["a", "b", "c", "d"]
    assert [*ReplicaBatches({0: iter("ace"), 1: iter("bdf")}, GlobalBatch(2, 1), 1, 0)] == [*"abcdef"], "no length"


def test_what_replicas_can_not_share_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"2 replicas x accumulate_grad_batches=1 = 2 batches, which 3.*2 / 3"):
        GlobalBatch(2, 1).accumulate_on(3)
    with pytest.raises(ValueError, match=r"and on 2 at an epoch's end.*4 replicas can't share 2"):
        GlobalBatch(2, 2).batches_on(4, stream=5)


def test_a_restart_keeps_the_global_batch() -> None:
    two = GlobalBatch(2, 1)
    assert regrouped(two, 2, 2, 1, True) == Regrouped(two, 1)
    assert regrouped(two, 2, 1, 1, True) == Regrouped(two, 2, ratio=Fraction(2))
    assert regrouped(two, 1, 2, 1, True) == Regrouped(two, 1, ratio=Fraction(1, 2)), "back on as many as it began with"
    assert regrouped(GlobalBatch(1, 4), 1, 2, 4, True) == Regrouped(GlobalBatch(1, 4), 2, ratio=Fraction(1, 2))
    with pytest.raises(ValueError, match="2 / 4 is no whole number"):
        regrouped(two, 2, 4, 1, True)
    with pytest.raises(ValueError, match="is up to its"):
        regrouped(two, 2, 1, 1, True, "is up to its training_step")


def test_a_checkpoint_that_the_user_chose_is_gone_on_from_as_the_user_says() -> None:
    two = GlobalBatch(2, 1)
    assert regrouped(two, 2, 1, 2, False) == Regrouped(two, 2, ratio=Fraction(2)), "the same batches"
    assert regrouped(two, 2, 2, 4, False) == Regrouped(GlobalBatch(2, 4), 4), "the user's own change"
    assert regrouped(two, 2, 2, 4, True).accumulate == 4, "by the epoch, as a callback says"
    found = regrouped(two, 2, 1, 1, False)
    assert (found.batch, found.ratio) == (GlobalBatch(1, 1), 1)
    assert found.warning is not None and "Write accumulate_grad_batches=2" in found.warning
    assert "2 replicas x accumulate_grad_batches=1 = 2 batches" in found.warning
    warning = regrouped(two, 2, 4, 1, False).warning
    assert warning is not None and "2 / 4 is no whole number" in warning


def _loop(total: int, current: int, completed: int = 0, last: bool = False) -> dict[str, object]:
    def counts(n: int) -> dict[str, int]:
        return dict(ready=n, started=n, processed=n, completed=n - completed)

    progress = dict(total=counts(total), current=counts(current), is_last_batch=last)
    epoch = dict(ready=2, started=2, processed=1, completed=1)
    return {
        "epoch_loop.batch_progress": progress,
        "epoch_progress": {"current": epoch},
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": 4},
    }


def test_progress_is_counted_in_batches_of_the_replicas_that_there_are() -> None:
    two, twice = GlobalBatch(2, 3), Fraction(2)
    found = counted_anew(_loop(13, 3, completed=1), Regrouped(two, 6, ratio=twice), window=3)
    assert found == _loop(26, 6), "what follows the batch is done by the run"
    found = counted_anew(_loop(13, 3), Regrouped(two, 6, ratio=twice), window=3)
    assert found == _loop(26, 6)


def test_batches_whose_gradients_are_lost_are_run_again() -> None:
    same = Regrouped(GlobalBatch(2, 3), 3)
    assert counted_anew(_loop(15, 5, completed=1), same, window=3) == _loop(13, 3)
    assert counted_anew(_loop(15, 5, last=True), same, window=3) == _loop(15, 5, last=True), "the epoch's last step"
    doubled = Regrouped(GlobalBatch(2, 3), 6, ratio=Fraction(2))
    assert counted_anew(_loop(15, 5), doubled, window=3) == _loop(26, 6)


def test_an_epoch_that_max_steps_closed_is_gone_on_with_after_a_restart_and_not_where_it_is_over() -> None:
    same = Regrouped(GlobalBatch(1, 1), 1)
    closed: Any = _loop(15, 5)
    closed["epoch_progress"]["current"] |= dict(processed=2, completed=2)
    assert counted_anew(closed, same, window=1) == closed, "as with Lightning on one device"
    found = counted_anew(closed, same, window=1, restarted=True)
    assert found["epoch_progress"]["current"] == dict(ready=2, started=2, processed=1, completed=1)
    assert batches_of_epoch(found) == 5
    for completed in (1, 2):  # in the epoch's end, and after it
        over: Any = _loop(20, 10, last=True)
        over["epoch_progress"]["current"] |= dict(processed=2, completed=completed)
        assert counted_anew(over, same, window=1) == over, "Lightning goes on from there by itself"
        found = counted_anew(over, same, window=1, by_steps=True)
        assert found["epoch_progress"]["current"] == dict.fromkeys(("ready", "started", "processed", "completed"), 2)
        progress = found["epoch_loop.batch_progress"]
        assert not any(progress["current"].values()) and {*progress["total"].values()} == {20}
        assert batches_of_epoch(found) == 0
    assert [*map(is_closed_within, (closed, found, over, _loop(15, 5)))] == [True, False, False, False]
    validated = _loop(20, 10, last=True)  # at the end of an epoch: the epoch's end is still to come
    assert counted_anew(validated, same, window=1) == validated
    assert counted_anew(_loop(20, 10, completed=1, last=True), same, window=1) == validated, (
        "and in the last batch's end"
    )
