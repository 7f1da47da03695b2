"""Puts the strict group in the place of NCCL on fake CUDA devices, of gloo on CPU.

torch's private names are used, as this stands in for a part of torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.gpu_rules.group import StrictGroup

c10d: Any = dist.distributed_c10d
CPU_NAME = "gloostrict"


def _in_place_of_nccl(kind: type[StrictGroup]) -> type[StrictGroup]:
    """What ``distributed_c10d`` makes where the backend is "nccl"."""

    class FakeNCCL(kind):  # type: ignore[valid-type, misc]
        class Options:
            is_high_priority_stream = False
            _timeout: Any = None
            global_ranks_in_group: list[int] = []
            group_name = ""

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            ranks = options.global_ranks_in_group or range(size)
            super().__init__(store, rank, list(ranks), options._timeout, "cuda", "nccl")

    return FakeNCCL


def install_for_cuda(kind: type[StrictGroup] = StrictGroup) -> None:
    """ "nccl" is the strict group; what stands on a CPU goes to gloo itself."""
    c10d._NCCL_AVAILABLE = True
    FakeNCCL = _in_place_of_nccl(kind)
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = FakeNCCL
    plain, init = c10d._get_object_coll_device, c10d.init_process_group

    def object_device(group: Any = None) -> str:
        return "cuda" if isinstance(group or dist.group.WORLD, StrictGroup) else plain(group)

    def init_process_group(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        # A device makes NCCL connect at once, and messages share the communicator of collectives: so they do here.
        init(*args, **kwargs)

    c10d._get_object_coll_device = object_device
    c10d.init_process_group = dist.init_process_group = init_process_group
    _install_batches()


def install_for_cpu() -> None:
    """The strict group is what a CPU gets that asks for no backend, by Lightning or torch."""

    def create(options: Any, _: Any) -> StrictGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        return StrictGroup(options.store, options.group_rank, ranks, options.timeout, "cpu", CPU_NAME)

    dist.Backend.register_backend(CPU_NAME, create, extended_api=True, devices=["cpu"])
    dist.Backend.default_device_backend_map["cpu"] = CPU_NAME
    _install_batches()


def _install_batches() -> None:
    """torch asks for the very class ``ProcessGroup`` before it batches messages; a group in Python is a subclass."""
    plain = c10d.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        group = p2p_op_list[0].group or dist.group.WORLD
        if not isinstance(group, StrictGroup):
            return plain(p2p_op_list)
        c10d._check_p2p_op_list(p2p_op_list)
        with c10d._coalescing_manager(group, torch.device(group.device), async_ops=True) as manager:
            for each in p2p_op_list:
                end = group.send if each.op is dist.isend else group.recv  # as torch's own `isend` does
                x = torch.view_as_real(each.tensor) if each.tensor.is_complex() else each.tensor
                end([x], each.group_peer, each.tag)
        return manager.works

    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv
