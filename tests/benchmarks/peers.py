"""What torch and Lightning bring themselves for a layout, on the same model and the same batches.

Lightning's strategies run in a Trainer each. `ModelParallelStrategy` wants a module that says how it is split; the two
here say it as Lightning's guide does. torch's pipelining is in `pipeline_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.benchmarks import sequence_step
from tests.benchmarks.loops import rows_of_rank
from tests.benchmarks.meter import device
from tests.benchmarks.pipeline_step import GPT, Block
from tests.benchmarks.trainer_side import TrainerSide


@dataclass(frozen=True)
class Here:
    """Where a run is.

    Args:
        ranks: how many.
        accelerator: of all Trainers: "cpu" or "gpu".
        batches: this rank's, of all steps.
    """

    ranks: int
    accelerator: str
    batches: Sequence[Tensor]

    @property
    def arguments(self) -> dict[str, Any]:
        """For a Trainer."""
        return {"accelerator": self.accelerator, "devices": self.ranks}


class Peer(TrainerSide):
    """A Trainer with a strategy of Lightning's."""

    def __init__(self, module: LightningModule, here: Here, strategy: Callable[[], Any]) -> None:
        super().__init__(module, here.batches, strategy, here.arguments, count_bytes=True)

    def weights(self) -> dict[str, Tensor]:
        state = self.trainer.strategy.lightning_module_state_dict()
        return {name: x.cpu() for name, x in state.items()}


def ddp(model: GPT, here: Here) -> Peer:
    return Peer(model, here, DDPStrategy)


def fsdp(model: GPT, here: Here) -> Peer:
    return Peer(model, here, lambda: FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="full"))


class Split(LightningModule):
    """A GPT that `ModelParallelStrategy` calls, and that says in ``configure_model`` how it is split."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def training_step(self, ids: Tensor) -> Tensor:
        return self.gpt(ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A foreach kernel takes no DTensor beside a plain one.
        kinds = [[p for p in self.parameters() if isinstance(p, DTensor) is split] for split in (True, False)]
        return self.gpt.optimizer_of([{"params": kind} for kind in kinds if kind])


class FullySharded(Split):
    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        self.gpt.to(mesh.device_type)
        for block in self.gpt.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self.gpt, mesh=mesh["data_parallel"])


class TensorSplit(Split):
    """By a plan written by hand; rows of q, k and v are put in order first, so that a rank's are neighbours."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        self.gpt.to(mesh.device_type)
        for block in self.gpt.blocks:
            assert isinstance(block, Block)
            for x in block.qkv.parameters():
                x.data = x.data[neighbours(len(x), mesh["tensor_parallel"].size())]
            block.heads //= mesh["tensor_parallel"].size()
            plan = {
                "qkv": ColwiseParallel(), "proj": RowwiseParallel(), "mlp.0": ColwiseParallel(),
                "mlp.2": RowwiseParallel(),
            }  # fmt: skip
            parallelize_module(block, mesh["tensor_parallel"], plan)


def neighbours(size: int, ranks: int) -> Tensor:
    """An order of the rows of q, k and v in which each rank's stand next to each other."""
    return torch.cat([rows_of_rank(size, 3, rank, ranks) for rank in range(ranks)])


class SplitPeer(Peer):
    def weights(self) -> dict[str, Tensor]:
        ranks = dist.get_world_size()
        weights = {name.removeprefix("gpt."): x for name, x in super().weights().items()}
        if isinstance(self.module, TensorSplit):
            weights |= {n: x[neighbours(len(x), ranks).argsort()] for n, x in weights.items() if ".qkv." in n}
        return weights


def model_parallel_fully_shard(model: GPT, here: Here) -> SplitPeer:
    return SplitPeer(FullySharded(model), here, lambda: ModelParallelStrategy(here.ranks, 1, False))


def model_parallel_tensor(model: GPT, here: Here) -> SplitPeer:
    return SplitPeer(TensorSplit(model), here, lambda: ModelParallelStrategy(1, here.ranks, False))


class ContextParallel(sequence_step.ByHand):
    """torch's ``context_parallel`` around a step: a ring of its own within ``F.scaled_dot_product_attention``."""

    def __init__(self, model: GPT) -> None:
        super().__init__(model)
        self.mesh = init_device_mesh(device().type, (dist.get_world_size(),))

    def step(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        whole, ids, tokens = ids.numel(), ids.clone(), torch.arange(ids.shape[1], device=ids.device)
        with context_parallel(self.mesh, buffers=[ids, tokens], buffer_seq_dims=[1, 0]):
            x = self.model.tokens(ids) + self.model.positions(tokens)
            for block in self.model.blocks:
                x = block(x)
            logits = self.model.head(self.model.norm(x)).flatten(0, 1)
            loss = F.cross_entropy(logits, ids.flatten(), reduction="sum") / whole
            loss.backward()
        sequence_step.sum_gradients(self.model)
        self.optimizer.step()
        self.loss = float(loss.detach())
