"""Process groups in which nothing moves."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_par.private.fake_groups import begin_fake_world


def test_a_rank_is_one_of_many_with_no_other_process() -> None:
    begin_fake_world(3, 8, timedelta(minutes=1))
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
        dist.all_reduce(torch.ones(2), group=dist.new_group([1, 3]))
    finally:
        dist.destroy_process_group()
