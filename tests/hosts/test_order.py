"""Ranks that SLURM has dealt out to hosts in turn: its variables are set as it would, on hosts made of namespaces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer

from tests.helpers import equality
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.hosts.network import Host, hosts, within
from tests.law.test_equality import one_device as one_device  # a fixture

PORT = 29517


def _slurm(rank: int, node: int, local: int, each: int, hosts: list[Host]) -> dict[str, str]:
    """As srun sets them for a task."""
    return {
        "SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "unused",
        "SLURM_NTASKS": f"{each * len(hosts)}", "SLURM_NTASKS_PER_NODE": f"{each}", "SLURM_NNODES": f"{len(hosts)}",
        "SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{local}", "SLURM_NODEID": f"{node}",
        "MASTER_ADDR": hosts[0].address, "MASTER_PORT": f"{PORT}", "TEST_NODES": f"{len(hosts)}",
    }  # fmt: skip


def _under_slurm(case: str, layout: dict[str, Any], folder: str, count: int, names: list[Any], cyclic: bool) -> Any:
    """On each rank: its result, SLURM's number of it, its node, and the nodes along its tensor and pipeline axes."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    each = world // count
    node, local = (rank % count, rank // count) if cyclic else divmod(rank, each)
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"], os.environ["LOCAL_RANK"], os.environ["NODE_RANK"]
    os.environ.update(_slurm(rank, node, local, each, names))
    found: dict[str, Any] = {}
    setup = Trainer._run

    def note(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        result = setup(trainer, *args, **kwargs)
        groups = trainer.strategy.groups  # type: ignore[attr-defined]
        found.update({axis: getattr(groups, axis).ranks for axis in ("data", "pipeline", "sequence", "tensor")})
        found.update(rank=trainer.global_rank, local=trainer.local_rank, first=trainer.is_global_zero)
        return result

    Trainer._run = note  # type: ignore[method-assign]
    try:
        with within(names[node].name):
            result = equality.run(case, layout, folder, data_size=layout.get("data_parallel_size", 1))
            nodes: list[Any] = [None] * world
            dist.all_gather_object(nodes, node)
            dist.destroy_process_group()
    finally:
        Trainer._run = setup  # type: ignore[method-assign]
    return result, rank, node, local, found, nodes


TP2 = dict(tensor_parallel_size=2)
ROWS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "2-hosts-dp2-tp2": (2, TP2 | dict(data_parallel_size=2), True),
    "2-hosts-pp2-tp2": (2, TP2 | dict(pipeline_parallel_size=2, microbatches=2, hybrid=True), True),
    "2-hosts-pp2-tp2-by-block": (2, TP2 | dict(pipeline_parallel_size=2, microbatches=2, hybrid=True), False),
    "2-hosts-sp4": (2, dict(sequence_parallel_size=4), True),
    "2-hosts-dp2-tp2-fsdp": (2, TP2 | dict(data_parallel_size=2, data_parallel="fsdp", hybrid=True), True),
    "3-hosts-pp3-tp2": (3, TP2 | dict(pipeline_parallel_size=3, microbatches=2, hybrid=True), True),
    "2-hosts-dp2-sp2-tp2": (2, TP2 | dict(data_parallel_size=2, sequence_parallel_size=2, hybrid=True), True),
}


@long()
@slow(but=["2-hosts-dp2-tp2"])
@pytest.mark.parametrize("row", ROWS)
def test_tensor_groups_are_within_hosts_in_any_distribution_of_slurm(
    row: str, pool: Pool, one_device: Any, tmp_path: Path
) -> None:
    count, layout, cyclic = ROWS[row]
    world, case = 1, "gpt"
    for name, size in layout.items():
        world *= size if name.endswith("_size") else 1
    with hosts(count) as made:
        told = pool.run(world, _under_slurm, case, layout, str(tmp_path), count, made, cyclic)
    reference = one_device(case, data_size=layout.get("data_parallel_size", 1))
    for result, launched, node, local, found, nodes in told:
        assert not equality.compare(reference, result, layout.get("data_parallel_size", 1)), row
        assert {nodes[rank] for rank in found["tensor"]} == {node}, "a tensor group goes across hosts"
        assert nodes == sorted(nodes) and nodes[found["rank"]] == node and result.rank == found["rank"]
        assert (found["rank"] == 0) == (launched == 0) == found["first"], "the first task is no longer the first rank"
        assert local == found["local"], "the device of a rank is that of its task on the host"
    assert sorted(found["rank"] for *_, found, _ in told) == [*range(world)]
