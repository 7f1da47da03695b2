"""Questions that a thread answers, and where the rank stands that is asked."""

from __future__ import annotations

import json
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_par.mesh.side_channel import Line, SideChannel
from lightning_par.mesh.standing import Standing
from lightning_par.private.process_groups import default_store
from tests.helpers.pool import Pool
from tests.helpers.slow import slow


def _answer(question: Any, line: Line) -> None:
    if question == "fail":
        raise ValueError("no such weight")
    line.say({"heard": question})
    line.send(memoryview(b"12345678"))


def _asks() -> list[Any]:
    dist.init_process_group("gloo")
    channel, told = SideChannel("test", dist.get_rank(), _answer), []
    if dist.get_rank() == 0:
        with channel.ask(1, ["weight", 3]) as line:
            told.append(line.hear())
            data = bytearray(8)
            line.receive_into(memoryview(data))
            told.append(bytes(data))
        with channel.ask(1, "fail") as line:
            told.append(line.hear())
        told.append(_stranger(1))
    dist.barrier()  # where rank 1 has been meanwhile
    channel.close()
    dist.barrier()
    if dist.get_rank() == 0:
        with (
            pytest.raises(RuntimeError, match="Rank 1 has left the run, or its process has ended"),
            channel.ask(1, "late"),
        ):
            pass
    return told


def _stranger(rank: int) -> bytes:
    """What one gets that does not know the secret."""
    host, port, *_ = json.loads(default_store().get(f"lightning_par/side channel/test/{rank}"))
    with socket.create_connection((host, port), 10) as connection:
        Line(connection).say(["guessed", "weight"])
        return connection.recv(1)


def test_a_rank_answers_while_its_own_code_waits(pool: Pool) -> None:
    told = pool.run(2, _asks)[0]
    assert told[:2] == [{"heard": ["weight", 3]}, b"12345678"]
    assert told[2] == {"failure": "ValueError: no such weight"} and told[3] == b""


def _waits(standing: Standing, steps: int, writes: int) -> None:
    for _ in standing.wait_at(steps, writes):
        pass


def test_a_rank_that_has_gone_on_says_so() -> None:
    standing = Standing()
    with standing.step():
        assert standing.inside == 1
    assert (standing.steps, standing.inside) == (1, 0)
    with pytest.raises(RuntimeError, match="gone on, to step 2 of the run, from step 1"):
        _waits(standing, 0, 0)
    standing.writes = 2
    with pytest.raises(RuntimeError, match="written to weights"):
        _waits(standing, 1, 1)


def test_who_is_behind_is_waited_for() -> None:
    standing, came = Standing(), threading.Event()

    def ask() -> None:
        _waits(standing, 1, 0)
        came.set()

    thread = threading.Thread(target=ask)
    thread.start()
    with standing.step():
        assert not came.wait(1.5)  # in a step it is not at rest, however long that takes
    began = time.monotonic()
    thread.join(30)
    assert came.is_set() and time.monotonic() - began > 0.5  # nor at once in code between steps, unless that waits


@slow()
def test_who_has_written_alone_is_not_waited_for() -> None:
    standing = Standing()
    store, told = dist.HashStore(), []

    def ask() -> None:
        with pytest.raises(RuntimeError, match="written to weights which this one has not, in code that it ran alone"):
            _waits(standing, 0, 1)
        told.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:  # this rank waits, as in a collective that the other does not come to
        with pytest.raises(dist.DistStoreError):
            dist.distributed_c10d._store_based_barrier(0, store, "a group", 2, timedelta(seconds=4))
    finally:
        dist.destroy_process_group()
        thread.join(30)
    assert told


def test_writes_count_from_one_step_to_the_next_and_not_within() -> None:
    standing = Standing()
    standing.wrote()
    with standing.step():
        standing.wrote()
        assert standing.writes == 1
    assert standing.writes == 0
