"""Messages between stages: any tensor, in any order of waiting, counted once, and no waiting for the dead."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.layout import Layout, make_groups
from lightning_par.mesh.ledger import Transfer, ledger
from lightning_par.mesh.wire import Kind
from lightning_par.pipeline.run.messages import MOST_UNDER_WAY, Incoming, Messenger, Outgoing
from lightning_par.private.process_groups import tells_of_a_lost_peer
from tests.helpers.pool import Pool, RanksFailedError

CPU = torch.device("cpu")
TIMEOUT = timedelta(minutes=30)


def _axis(layout: Layout) -> Axis:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    return make_groups(layout, TIMEOUT).pipeline


def _send(messenger: Messenger, x: Tensor, to: int, kind: Kind, tag: int) -> None:
    messenger.exchange([Outgoing(x, to, kind, tag)], [])


def _receive(messenger: Messenger, like: Tensor, source: int, kind: Kind, tag: int) -> Tensor:
    (wait,) = messenger.exchange([], [Incoming(like.shape, like.dtype, source, kind, tag)])
    return wait()


def _kinds_of_tensors() -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(6, 5)
    whole = [x, x.double(), x.bfloat16(), x.half(), (x * 9).long(), (x * 9).to(torch.int16), (x * 9).to(torch.uint8)]
    rest = [x > 0, torch.complex(x, x + 1), torch.complex(x, x + 1).conj(), torch.complex(x, x + 1).conj().imag]
    strided = [x.t(), x[:, 1:4], x[::2], x[0, 0], x[:1].expand(4, 5), x.to(torch.float8_e4m3fn)]
    return [*whole, *rest, *strided, torch.empty(0, 3)]


def _send_all_kinds() -> list[Transfer]:
    axis = _axis(Layout(pipeline=2))
    messenger = Messenger(axis, CPU)
    with ledger() as moved:
        for tag, x in enumerate(_kinds_of_tensors()):
            if axis.rank == 0:
                _send(messenger, x, 1, "forward", tag)
            else:
                received = _receive(messenger, x, 0, "forward", tag)
                assert received.dtype == x.dtype and received.is_contiguous()
                assert torch.equal(_comparable(received), _comparable(x))
        messenger.finish()
    return moved.transfers


def _comparable(x: Tensor) -> Tensor:
    """Float8 knows no comparison."""
    return x.float() if x.element_size() == 1 else x


def test_any_tensor_arrives_and_counts_where_it_left(pool: Pool) -> None:
    sent, received = pool.run(2, _send_all_kinds)
    tensors = _kinds_of_tensors()[:-1]  # nothing is sent for a tensor without elements
    for transfers, verb in ((sent, "send"), (received, "recv")):
        assert [(t.numel, t.nbytes) for t in transfers] == [(x.numel(), x.numel() * x.element_size()) for x in tensors]
        assert {(t.verb, t.axis, t.purpose, t.ranks) for t in transfers} == {(verb, "pipeline", "activations", 2)}
    assert [t.sent for t in sent] == [x.numel() * x.element_size() for x in tensors]
    assert sum(t.sent for t in received) == 0


def _cross() -> list[float]:
    """Three ranks in a ring, both kinds, both ways, several under way at once, those of one step in a batch."""
    axis = _axis(Layout(pipeline=3))
    others: list[tuple[int, Kind]] = [((axis.rank + i) % 3, kind) for i in (1, 2) for kind in ("forward", "backward")]
    messenger, expected = Messenger(axis, CPU), []
    for _ in range(2):
        waits = []
        for i in range(3):
            sent = [Outgoing(_value(axis.rank, o, kind, i).expand(2, 2), o, kind, i) for o, kind in others]
            waits += messenger.exchange(sent, [Incoming((2, 2), torch.float32, o, kind, i) for o, kind in others])
        received = [wait() for wait in waits[::-1]][::-1]
        expected = [_value(o, axis.rank, kind, i).item() for i in range(3) for o, kind in others]
        assert [x.mean().item() for x in received] == expected
        assert waits[0]() is received[0]
        messenger.finish()
    return expected


def _value(sender: int, receiver: int, kind: Kind, i: int) -> Tensor:
    return torch.tensor(sender * 1000.0 + receiver * 100 + (kind == "forward") * 10 + i)


def test_messages_of_both_kinds_cross(pool: Pool) -> None:
    assert len({tuple(rank) for rank in pool.run(3, _cross)}) == 3


def _release() -> None:
    """A message that has left is let go while another still waits for its receiver."""
    axis = _axis(Layout(pipeline=2))
    messenger = Messenger(axis, CPU)
    if axis.rank == 0:
        x = torch.ones(1000)
        memory = StorageWeakRef(x.untyped_storage())
        _send(messenger, x, 1, "forward", 0)
        del x
        (wait,) = messenger.exchange([], [Incoming((4,), torch.float32, 1, "backward", 0)])
        _send(messenger, torch.ones(1000), 1, "forward", 1)
        assert not memory.expired()
        wait()
        assert memory.expired()  # what comes back tells that the first has left
        dist.barrier()
    else:
        _receive(messenger, torch.ones(1000), 0, "forward", 0)
        _send(messenger, torch.ones(4), 0, "backward", 0)
        dist.barrier()
    dist.barrier()
    if axis.rank == 1:
        _receive(messenger, torch.ones(1000), 0, "forward", 1)
    messenger.finish()


def test_what_has_left_is_let_go(pool: Pool) -> None:
    pool.run(2, _release)  # ends


def _send_many() -> None:
    """Where nothing comes back, a few messages are under way at most."""
    axis = _axis(Layout(pipeline=2))
    messenger, memories = Messenger(axis, CPU), list[StorageWeakRef]()
    for tag in range(3 * MOST_UNDER_WAY):
        if axis.rank == 0:
            x = torch.ones(1000)
            memories.append(StorageWeakRef(x.untyped_storage()))
            _send(messenger, x, 1, "forward", tag)
            del x
            assert sum(not x.expired() for x in memories) <= MOST_UNDER_WAY + 1
        else:
            _receive(messenger, torch.ones(1000), 0, "forward", tag)
    messenger.finish()
    assert all(x.expired() for x in memories)


def test_a_few_messages_are_under_way(pool: Pool) -> None:
    pool.run(2, _send_many)


def _talk_to_the_dead() -> None:
    axis = _axis(Layout(pipeline=2))
    if axis.rank == 1:
        dist.barrier()
        os._exit(3)
    messenger = Messenger(axis, CPU)
    _send(messenger, torch.ones(10**6), 1, "forward", 0)
    dist.barrier()  # it is under way
    with pytest.raises(RuntimeError, match="Receiving gradients of activations from pipeline rank 1 failed") as caught:
        _receive(messenger, torch.ones(4), 1, "backward", 0)
    assert tells_of_a_lost_peer(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="Sending activations to pipeline rank 1 failed"):
        messenger.finish()
    late = Messenger(messenger._axis, CPU)
    with pytest.raises(RuntimeError, match="Sending gradients of activations to pipeline rank 1 failed"):
        _send(late, torch.ones(4), 1, "backward", 0)
        late.finish()


def test_a_dead_peer_is_an_error_long_before_the_timeout(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="exit code 3") as caught:
        pool.run(2, _talk_to_the_dead, grace=100)
    assert list(caught.value.reports) == [1]


def test_one_rank_needs_nothing() -> None:
    Messenger(make_groups(Layout(), TIMEOUT).pipeline, CPU).finish()


def test_sparse_tensors_are_refused() -> None:
    messenger = Messenger(make_groups(Layout(), TIMEOUT).pipeline, CPU)
    with pytest.raises(TypeError, match=r"layout torch.sparse_coo can't be sent.*to_dense"):
        _send(messenger, torch.eye(2).to_sparse(), 1, "forward", 0)


def test_what_has_no_values_is_not_sent() -> None:
    """Its receiver would wait for ever."""
    messenger = Messenger(make_groups(Layout(), TIMEOUT).pipeline, CPU)
    with FakeTensorMode(), pytest.raises(RuntimeError, match="trial of the step has come into its run"):
        _send(messenger, torch.ones(2), 1, "forward", 0)
