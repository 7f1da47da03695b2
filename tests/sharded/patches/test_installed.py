"""Patches are there as long as anyone holds them."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.absent.origin import Origin
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.private.fake_tensors import FakeTensorMode
from lightning_par.sharded.identity import become
from lightning_par.sharded.patches import installed
from lightning_par.sharded.patches.installed import Patches, release
from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.slow import long


@pytest.fixture(autouse=True)
def _only_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded tensors that another test of this process keeps alive are none of what is counted here."""
    found = installed._sharded
    before = found()
    monkeypatch.setattr(installed, "_sharded", lambda: [x for x in found() if not any(x is old for old in before)])


AXIS = Axis("tensor", (0,), 0, dist.ProcessGroup(0, 1))
"""As of a run."""


class Count:
    """A patch that counts."""

    def __init__(self, log: list[str], name: str = "") -> None:
        self.log, self.name = log, name

    def install(self) -> None:
        if self.name == "fails":
            raise ZeroDivisionError
        self.log.append(f"+{self.name}")

    def undo(self) -> None:
        self.log.append(f"-{self.name}")


class Holder:
    """A strategy, as far as patches know it."""


def test_the_first_installs_and_the_last_undoes_in_the_other_order() -> None:
    log: list[str] = []
    patches, holders = Patches(lambda: [Count(log, "a"), Count(log, "b")]), [Holder(), Holder()]
    for holder in (*holders, holders[0]):
        patches.hold(holder)
    patches.release(holders[0])
    patches.release(holders[0])
    assert log == ["+a", "+b"]
    patches.release(holders[1])
    assert log == ["+a", "+b", "-b", "-a"]
    with patches.installed():
        assert log[4:] == ["+a", "+b"]
    assert log[6:] == ["-b", "-a"]


def test_a_holder_that_is_collected_holds_nothing() -> None:
    log: list[str] = []
    patches, holder = Patches(lambda: [Count(log)]), Holder()
    patches.hold(holder)
    del holder
    assert log == ["+", "-"]


def test_what_fails_to_install_leaves_nothing() -> None:
    log: list[str] = []
    patches, holder = Patches(lambda: [Count(log, "a"), Count(log, "fails"), Count(log, "c")]), Holder()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            patches.hold(holder)
    assert log == ["+a", "-a"] * 2


def test_threads_hold_and_release() -> None:
    log: list[str] = []
    patches = Patches(lambda: [Count(log)])

    def run() -> None:
        for _ in range(300):
            with patches.installed():
                assert log[-1] == "+"

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log == ["+", "-"] * (len(log) // 2)


def _sharded() -> ShardedTensor:
    whole = torch.nn.Parameter(torch.ones(2, 2))
    return ShardedTensor(whole, 0, Positions.of([0, 0]), AXIS)


def test_a_sharded_tensor_that_is_left_holds_them_until_it_is_whole() -> None:
    logs: dict[str, list[str]] = {"a": [], "b": []}
    kinds, holder = [Patches(lambda log=log: [Count(log)]) for log in logs.values()], Holder()
    kinds[0].hold(holder)
    x: Any = _sharded()
    release(holder, kinds)
    assert logs == {"a": ["+"], "b": []}
    kinds[1].hold(holder)  # another run
    release(holder, kinds)
    assert logs == {"a": ["+"], "b": ["+"]}
    become(x, torch.nn.Parameter(torch.ones(2, 2)), "x")
    assert logs == {"a": ["+", "-"], "b": ["+", "-"]} and not vars(x)


@long()
def test_what_is_made_of_what_is_left_holds_them_too() -> None:
    log: list[str] = []
    patches, holder = Patches(lambda: [Count(log)]), Holder()
    patches.hold(holder)
    x = _sharded()
    release(holder, [patches])
    y: Any = x.with_local(torch.zeros(2, 2))
    del x
    assert log == ["+"]
    z = copy.deepcopy(y)
    assert not pickle.loads(pickle.dumps(vars(y)["_patches"][0])).__dict__
    del y
    assert log == ["+"]
    del z
    assert log == ["+", "-"]


def test_what_a_plan_keeps_of_a_trial_holds_none() -> None:
    log: list[str] = []
    patches, holder = Patches(lambda: [Count(log)]), Holder()
    patches.hold(holder)
    with FakeTensorMode():
        x = ShardedTensor(torch.ones(2, 2), 0, Positions.of([0, 0]), AXIS)
    release(holder, [patches])
    assert log == ["+", "-"] and x.shape == (2, 2)


def test_what_is_of_no_run_holds_none() -> None:
    log: list[str] = []
    patches, holder = Patches(lambda: [Count(log)]), Holder()
    patches.hold(holder)
    pretended = Axis("tensor", (0, 1), 0, None)
    dry = Axis("tensor", (0,), 0, dist.ProcessGroup(0, 1))
    dry.dry = True
    left = [ShardedTensor(torch.ones(2, 2), 0, Positions.of([0, 0]), axis) for axis in (pretended, dry)]
    away = [Elsewhere((2,), torch.float32, torch.device("cpu"), Origin("x", (1,), axis)) for axis in (pretended, dry)]
    release(holder, [patches])
    assert log == ["+", "-"] and len(left) == len(away)
    x = Elsewhere((2,), torch.float32, torch.device("cpu"), Origin("x", (1,), AXIS))
    patches.hold(holder)
    release(holder, [patches])
    assert log == ["+", "-", "+"]
    del x
    assert log[3:] == ["-"]
