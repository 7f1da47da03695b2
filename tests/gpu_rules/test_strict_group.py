"""The strict group itself: what NCCL would do is done, and what it would not is told."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu_rules.group import UNBATCHED
from tests.gpu_rules.ranks import StrictPool
from tests.gpu_rules.report import Rules
from tests.helpers.accelerator import device_type
from tests.helpers.pool import RanksFailedError
from tests.helpers.slow import slow

_POOLS = pytest.mark.parametrize("pool_name", ["strict_cpu", "pool"], ids=["cpu", "cuda"])


def both(test: Any) -> Any:
    """On fake CUDA, and where all tests run on CPU too."""
    return slow("*cpu")(_POOLS(test))


@pytest.fixture
def ranks(request: pytest.FixtureRequest, pool_name: str) -> StrictPool:
    return request.getfixturevalue(pool_name)


def _begin() -> tuple[int, int, torch.device]:
    dist.init_process_group()
    rank = dist.get_rank()
    device = torch.device(device_type(), rank) if device_type() == "cuda" else torch.device("cpu")
    return rank, dist.get_world_size(), device


def _kinds(pool: StrictPool) -> set[str]:
    return {violation.kind for report in pool.reports for violation in report.violations}


# ------------------------------------------------------------------------------------------------- what is allowed


def _all_verbs() -> dict[str, list[float]]:
    rank, size, device = _begin()
    x = torch.full((2,), rank + 1.0, device=device)
    found = {}

    def add(name: str, y: Tensor | Iterable[Tensor]) -> None:
        found[name] = torch.cat([part.cpu() for part in ([y] if isinstance(y, Tensor) else y)]).tolist()

    add("all_reduce", _reduced(x, dist.ReduceOp.SUM))
    add("average", _reduced(x, dist.ReduceOp.AVG))
    add("maximum", _reduced(x, dist.ReduceOp.MAX))
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x)
    add("all_gather", parts)
    whole = x.new_empty(2 * size)
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    work.wait()
    add("all_gather_into_tensor", whole)
    own = x.new_empty(2)
    dist.reduce_scatter_tensor(own, whole.clone(), async_op=True).wait()
    add("reduce_scatter_tensor", own)
    dist.reduce_scatter(own, [part.clone() for part in parts])
    add("reduce_scatter", own)
    dist.all_to_all_single(rows := torch.empty_like(whole), whole * (rank + 1))
    add("all_to_all_single", rows)
    dist.broadcast(y := x.clone(), src=1)
    add("broadcast", y)
    with dist.distributed_c10d._coalescing_manager(device=device, async_ops=True) as manager:
        dist.all_reduce(y := x.clone())
        dist.all_reduce(z := x * 10)
    manager.wait()
    add("coalesced", [y, z])
    dist.barrier()
    box = [rank]
    dist.broadcast_object_list(box, src=0)
    assert box == [0]
    return found


def _in_inference_mode() -> list[float]:
    rank, _, device = _begin()
    with torch.inference_mode():
        x = torch.full((2, 1), 1.0 + rank, device=device)
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        dist.all_reduce(out)
        return out.flatten().tolist()


@both
def test_inference_tensors_are_messages_too(ranks: StrictPool) -> None:
    assert ranks.run(2, _in_inference_mode) == [[2.0, 4.0]] * 2


def _reduced(x: Tensor, op: dist.ReduceOp) -> Tensor:
    y = x.clone()
    dist.all_reduce(y, op=op)
    return y


@both
@pytest.mark.parametrize("queue", ["communicator", "rank"])
def test_collectives_give_what_they_must(ranks: StrictPool, queue: str) -> None:
    ranks.rules = Rules(queue=queue)  # type: ignore[arg-type]
    zero, one = ranks.run(2, _all_verbs)
    gathered = [1.0, 1.0, 2.0, 2.0]
    assert zero == {
        "all_reduce": [3.0, 3.0],
        "average": [1.5, 1.5],
        "maximum": [2.0, 2.0],
        "all_gather": gathered,
        "all_gather_into_tensor": gathered,
        "reduce_scatter_tensor": [2.0, 2.0],
        "reduce_scatter": [2.0, 2.0],
        "all_to_all_single": [1.0, 1.0, 2.0, 2.0],
        "broadcast": [2.0, 2.0],
        "coalesced": [3.0, 3.0, 30.0, 30.0],
    }
    assert one["all_to_all_single"] == [2.0, 2.0, 4.0, 4.0] and one["reduce_scatter"] == [4.0, 4.0]
    assert ranks.broken() == [] and [report.groups for report in ranks.reports] == [[(0, 1)]] * 2


def _around_the_ring(messages: int) -> tuple[list[float], int]:
    """Each rank sends to both neighbours, receives from both, in an order that fits nobody: as one batch."""
    rank, size, device = _begin()
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = [torch.full((3,), 10.0 * rank + i, device=device) for i in range(2 * messages)]
    received = [torch.empty(3, device=device) for _ in sent]
    operations = [dist.P2POp(dist.isend, x, after if i % 2 else before) for i, x in enumerate(sent)]
    operations += [dist.P2POp(dist.irecv, x, before if i % 2 else after) for i, x in enumerate(received)]
    works = dist.batch_isend_irecv(operations)
    for work in works:
        work.wait()
    return [x[0].item() for x in received], len(works)


@both
@pytest.mark.parametrize("queue", ["communicator", "rank"])
def test_a_batch_of_messages_is_one_entry_in_any_order(ranks: StrictPool, queue: str) -> None:
    ranks.rules = Rules(queue=queue)  # type: ignore[arg-type]
    results = ranks.run(3, _around_the_ring, 2)
    for rank, (got, works) in enumerate(results):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        assert got == [10.0 * after, 10.0 * before + 1, 10.0 * after + 2, 10.0 * before + 3]
        assert works == 1
    assert [[entry.kind for entry in report.issued] for report in ranks.reports] == [["batch"]] * 3
    assert ranks.broken() == []


def _slowly(entries: int) -> tuple[float, float]:
    _, _, device = _begin()
    x = torch.ones(2, device=device)
    began = time.monotonic()
    works = [dist.all_reduce(x, async_op=True) for _ in range(entries)]
    issued = time.monotonic() - began
    for work in works:
        work.wait()
    return issued, time.monotonic() - began


def test_a_delay_is_taken_by_each_entry_and_not_by_the_host(pool: StrictPool) -> None:
    pool.rules = Rules(delay=0.1, checks=False)
    for issued, ended in pool.run(2, _slowly, 4):
        assert issued < 0.1 and ended >= 0.4


# ---------------------------------------------------------------------------------------------------- what is told


def _unbatched() -> None:
    rank, _, device = _begin()
    x = torch.ones(2, device=device)
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank)


@both
def test_a_message_without_a_batch_is_told_where_more_than_two_ranks_are(ranks: StrictPool) -> None:
    ranks.run(3, _unbatched)
    assert _kinds(ranks) == {UNBATCHED}
    ranks.run(2, _unbatched)
    assert ranks.broken() == []


def _crossed(batched: bool) -> None:
    """Both send first, as gloo lets them."""
    rank, _, device = _begin()
    sent, received = torch.ones(2, device=device), torch.empty(2, device=device)
    operations = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    if batched:
        works = dist.batch_isend_irecv(operations)
    else:
        works = [each.op(each.tensor, 1 - rank) for each in operations]
    for work in works:
        work.wait()


@both
def test_messages_that_cross_deadlock_and_both_queues_are_shown(ranks: StrictPool) -> None:
    ranks.rules = Rules(patience=1.0)
    ranks.run(2, _crossed, True)
    assert ranks.broken() == []
    with pytest.raises(RanksFailedError, match="deadlock under NCCL's rules") as caught:
        ranks.run(2, _crossed, False)
    for report in caught.value.reports.values():
        assert "rank 0 waits for send to rank 1" in report and "rank 1 waits for send to rank 0" in report
        assert "send to rank 1 on communicator 0 of ranks 0, 1 at [gpu_rules/test_strict_group.py" in report
        assert "then recv from rank 1" in report and "then recv from rank 0" in report


def _two_communicators(crossed: bool) -> float:
    rank, _, device = _begin()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    x = torch.ones(2, device=device)
    order = groups if rank == 0 or not crossed else groups[::-1]
    for work in [dist.all_reduce(x.clone(), group=group, async_op=True) for group in order]:
        work.wait()
    return x.sum().item()


@both
def test_opposite_orders_on_two_communicators_are_counted(ranks: StrictPool) -> None:
    ranks.run(2, _two_communicators, False)
    assert ranks.opposite().total() == 0
    ranks.run(2, _two_communicators, True)
    assert ranks.opposite().total() == 1 and len(ranks.broken()) == 1
    assert [report.groups for report in ranks.reports] == [[(0, 1)] * 3] * 2


@both
def test_opposite_orders_deadlock_where_a_rank_has_one_queue(ranks: StrictPool) -> None:
    ranks.rules = Rules(queue="rank", patience=1.0)
    ranks.run(2, _two_communicators, False)
    with pytest.raises(RanksFailedError, match="deadlock under NCCL's rules"):
        ranks.run(2, _two_communicators, True)


def _a_slow_rank() -> float:
    rank, _, device = _begin()
    x = torch.ones(1, device=device)
    if rank:
        time.sleep(1.5)
    dist.all_reduce(x)
    return x.item()


def test_a_slow_rank_is_no_deadlock(pool: StrictPool) -> None:
    pool.rules = Rules(patience=0.5)
    assert pool.run(2, _a_slow_rank) == [2.0, 2.0]


def _different() -> None:
    rank, _, device = _begin()
    x = torch.ones(2 + rank, device=device)
    dist.all_reduce(x)


def _written_to() -> None:
    rank, _, device = _begin()
    x = torch.ones(2, device=device)
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
    if rank == 0:
        x.add_(1)
        dist.barrier()
    else:
        assert x.isnan().all()  # nothing has come before the wait
        dist.barrier()
    work.wait()


def _tags() -> None:
    rank, _, device = _begin()
    for tag in (1, 2) if rank == 0 else (2, 1):
        x = torch.ones(2, device=device)
        dist.send(x, 1, tag=tag) if rank == 0 else dist.recv(x, 0, tag=tag)


def _strided() -> None:
    _, _, device = _begin()
    dist.all_reduce(torch.ones(3, 2, device=device).t())


def test_what_nccl_would_take_for_something_else_is_told(pool: StrictPool) -> None:
    with pytest.raises(RanksFailedError, match="ranks are at different collectives"):
        pool.run(2, _different)
    with pytest.raises(RanksFailedError, match="by NCCL's order another message comes here"):
        pool.run(2, _tags, grace=3.0)
    pool.run(2, _strided)
    assert _kinds(pool) == {"a tensor that is not contiguous"}


def _on_the_host() -> None:
    _begin()
    dist.all_reduce(torch.ones(2))


def test_a_cpu_tensor_given_to_nccl_is_refused(pool: StrictPool) -> None:
    with pytest.raises(RanksFailedError, match="No backend type associated with device type cpu"):
        pool.run(2, _on_the_host)
