"""What a rank of torch's own engine asks for, and what torch's allocator reserves for it: FSDP, tensor parallelism with
`loss_parallel`, and 1F1B, of a Llama on fake tensors, as torchtitan puts them together with all layers recomputed.

``python -m tests.planner.torchs_own 70b`` (or ``405b-0``, ``405b-1``, ``405b-7``, ``8b``) takes one to two minutes.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.planner.allocator import Allocator
from tests.planner.models import rotate

VOCAB = 128256
SIZES = {  # hidden, heads, ffn
    "8b": (4096, 32, 14336),
    "70b": (8192, 64, 28672),
    "405b": (16384, 128, 53248),
}


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.wq, self.wo = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.wk, self.wv = (nn.Linear(hidden, 8 * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:2], -1, self.size).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        q, k = (rotate(y.float(), cos, sin).type_as(y) for y in (q, k))
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(*x.shape[:2], -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(hidden, heads), FeedForward(hidden, ffn)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Stage(nn.Module):
    """Layers, with the embedding before the first ones and the head behind the last."""

    def __init__(self, name: str, layers: int, first: bool, last: bool) -> None:
        super().__init__()
        hidden, heads, ffn = SIZES[name]
        self.tok = nn.Embedding(VOCAB, hidden) if first else None
        self.layers = nn.ModuleDict({str(i): Block(hidden, heads, ffn) for i in range(layers)})
        self.norm = nn.RMSNorm(hidden) if last else None
        self.output = nn.Linear(hidden, VOCAB, bias=False) if last else None
        self.angles: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tok is None else self.tok(x)
        for layer in self.layers.values():
            x = layer(x, *self.angles)
        return x if self.output is None or self.norm is None else self.output(self.norm(x))


def split(stage: Stage, mesh: DeviceMesh) -> None:
    """Over the tensor axis, tokens between islands."""
    whole, tokens = Replicate(), Shard(1)
    parallelize_module(stage, mesh, {name: style for name, style in {
        "tok": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }.items() if getattr(stage, name) is not None})  # fmt: skip
    for block in stage.layers.values():
        parallelize_module(block, mesh, {
            "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(tokens, None, None), desired_input_layouts=(whole, None, None)
            ),
            "feed_forward": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,)),
            "attention.wo": RowwiseParallel(output_layouts=tokens),
            "feed_forward.w2": RowwiseParallel(output_layouts=tokens),
            **{f"attention.{x}": ColwiseParallel() for x in ("wq", "wk", "wv")},
            **{f"feed_forward.{x}": ColwiseParallel() for x in ("w1", "w3")},
        })  # fmt: skip


def store(stage: Stage, mesh: DeviceMesh, reshard: bool) -> None:
    """Weights in parts."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    last = len(stage.layers) - 1
    for i, block in enumerate(stage.layers.values()):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard and i < last)
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


class Events(TorchDispatchMode):
    """What of the fakes in distributed tensors is made and let go."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int]] = []
        self.known: dict[int, int] = {}
        self.shapes = 0  # inside of this many calls that find out shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result) if not self.shapes else ():
            if isinstance(x, Tensor) and not isinstance(x, DTensor) and x.device.type != "meta":
                self.made(x.untyped_storage())
        return result

    def made(self, memory: Any) -> None:
        key, number = memory._cdata, len(self.found)
        if key not in self.known and memory.nbytes():
            self.known[key] = number
            self.found.append((number, memory.nbytes()))
            weakref.finalize(memory, self.freed, key, number)

    def freed(self, key: int, number: int | None = None) -> None:
        if number is None or self.known.get(key) == number:
            self.found.append((self.known.pop(key), -1))

    def allocate(self, x: Tensor) -> None:
        """As FSDP does for gathered weights."""
        memory = x.untyped_storage()
        if memory.size() != x.numel() * x.itemsize:
            memory.resize_(x.numel() * x.itemsize)
            self.made(memory)

    def free(self, x: Tensor) -> None:
        memory = x.untyped_storage()
        if memory.size():
            memory.resize_(0)
            self.freed(memory._cdata)

    def of_shapes(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def asks(*args: Any, **kwargs: Any) -> Any:
            self.shapes += 1
            try:
                return old(*args, **kwargs)
            finally:
                self.shapes -= 1

        return asks

    def patches(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for name in [x for x in dir(ShardingPropagator) if "propagate_tensor_meta" in x]:
            asks = self.of_shapes(getattr(ShardingPropagator, name))
            stack.enter_context(mock.patch.object(ShardingPropagator, name, asks))
        stack.enter_context(mock.patch.object(_fsdp_param, "alloc_storage", self.allocate))
        stack.enter_context(mock.patch.object(_fsdp_param, "free_storage", self.free))
        return stack


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(0, 1))


def _known_forms(_: Any, stages: Any, *args: Any) -> None:
    """What stages would tell one another first."""
    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC


def run(
    name: str, layers: int, data: int, tensor: int, batch: tuple[int, int], pipeline: int = 1, place: int = 0
) -> tuple[int, int]:
    """Two steps of a rank: the most bytes that it asks for, and those reserved."""
    dist.init_process_group("fake", rank=place * data * tensor, world_size=pipeline * data * tensor, store=FakeStore())
    mesh = init_device_mesh("cpu", (pipeline, data, tensor), mesh_dim_names=("stages", "data", "tensor"))
    first, last, tokens = place == 0, place == pipeline - 1, batch[1]
    with torch.device("meta"):
        stage = Stage(name, layers, first, last)
    if tensor > 1:
        split(stage, mesh["tensor"])
    for i in stage.layers:
        stage.layers[i] = checkpoint_wrapper(stage.layers[i], preserve_rng_state=False)
    store(stage, mesh["data"], pipeline == 1)
    events = Events()
    classes = loss_parallel() if tensor > 1 else contextlib.nullcontext()
    forms = mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", _known_forms)
    with events.patches(), forms, FakeTensorMode(allow_non_fake_inputs=True), events:
        stage.to_empty(device="cpu")
        hidden, heads, _ = SIZES[name]
        stage.angles = torch.empty(tokens, hidden // heads), torch.empty(tokens, hidden // heads)
        optimizer = torch.optim.AdamW(stage.parameters(), foreach=True)
        step = _step(stage, batch) if pipeline == 1 else _staged(stage, mesh, batch, tensor, place, pipeline)
        with classes:
            for _ in range(2):
                step()
                optimizer.step()
                optimizer.zero_grad()
    found = Allocator()
    found.run(events.found)
    return found.most_asked, found.reserved


def _step(stage: Stage, batch: tuple[int, int]) -> Callable[[], None]:
    def step() -> None:
        x = torch.zeros(batch, dtype=torch.long)
        logits = stage(x)
        loss = loss_of(logits, torch.zeros(batch, dtype=torch.long))
        del logits
        loss.backward()

    return step


def _staged(
    stage: Stage, mesh: DeviceMesh, batch: tuple[int, int], tensor: int, place: int, pipeline: int
) -> Callable[[], None]:
    samples, tokens = batch
    hidden = stage.angles[0].shape[1] * SIZES["405b"][1]
    first, last = stage.tok is not None, stage.output is not None
    between = torch.empty(samples, tokens // tensor, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    given = torch.empty(samples, tokens, dtype=torch.long, device="meta") if first else between
    logits = torch.empty(samples, tokens, VOCAB // tensor, dtype=torch.bfloat16, device="meta", requires_grad=True)
    piece = PipelineStage(
        stage, place, pipeline, torch.device("cpu"), input_args=(given,), output_args=(logits if last else between,),
        output_grads=None if last else (between.detach(),), input_grads=None if first else (between.detach(),),
        group=mesh["stages"].get_group(),
    )  # fmt: skip
    schedule = Schedule1F1B(piece, pipeline, loss_fn=loss_of)
    whole = (samples * pipeline, tokens)

    def step() -> None:
        given = [torch.zeros(whole, dtype=torch.long)] if first else []
        schedule.step(*given, **({"target": torch.zeros(whole, dtype=torch.long), "losses": []} if last else {}))

    return step


CASES: dict[str, tuple[Any, ...]] = {
    "8b": ("8b", 32, 8, 1, (1, 32768)),
    "70b": ("70b", 80, 32, 8, (16, 8192)),
    **{f"405b-{place}": ("405b", 16 - (place in (0, 7)), 8, 8, (4, 8192), 8, place) for place in range(8)},
}


if __name__ == "__main__":
    asked, reserved = run(*CASES[sys.argv[1]])
    print(f"{sys.argv[1]}: {asked / 1e9:.2f} GB, {reserved / 1e9:.2f} reserved, {reserved / asked:.3f}")
