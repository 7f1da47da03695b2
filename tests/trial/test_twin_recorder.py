"""A run on sharded tensors tells what the step would do on whole ones, or that it does not know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lightning_par.pipeline.trial.surveyor import Surveyor
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.sequence.batch_tensor import mark
from lightning_par.sequence.part import PlanningAxis
from lightning_par.sequence.plan import first_plan
from lightning_par.sequence.plan import make_plan as plan_tokens
from lightning_par.sharded.patches import SHARDED, SHARES
from lightning_par.tensor.plan import make_plan as plan_weights
from lightning_par.tensor.plan import styles_for
from lightning_par.trial.batch_tensors import names_of, tensors_of
from lightning_par.trial.recording import Recording
from lightning_par.trial.trial_run import record_step
from tests.helpers.models import MODELS
from tests.helpers.slow import long, slow

NAMES = ("hf_llama", "hf_bert", "hf_gpt2", "hf_t5", "hf_whisper", "hf_mixtral")
C, TOKENS = 8, 6


def _both(module: nn.Module, batch: Any) -> tuple[Recording, Recording | None]:
    """The step on a batch, and what a run of it on the split batch tells of that."""
    plan = first_plan(tensors_of(batch), names_of(batch), 2, None)
    split = {"prepare": lambda x: mark(x, plan.dim_of, PlanningAxis(2, False)), "twin": True}
    found = []
    with SHARDED.installed(), SHARES.installed():
        for more in ({}, split):
            torch.manual_seed(0)
            found.append(record_step(module, "training_step", batch, listeners=lambda: Surveyor(4), **more))  # type: ignore[arg-type]
    return found[0], found[1].plain


def _told(recording: Recording) -> list[Any]:
    """What the events are, with tensors by number and by how they lie in memory."""
    known: dict[int, Any] = {id(x): names for names, x in recording.parameters.items()}

    def told(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x if isinstance(x, int | float | str) else type(x).__name__
        known.setdefault(id(x), len(known))
        return known[id(x)], tuple(x.shape), x.dtype, x.stride()

    events = recording.events
    return [(e.name, e.place, tree_leaves(tree_map(told, (e.args, e.kwargs, e.result)))) for e in events]


def _assert_alike(module: nn.Module, batch: Any) -> None:
    plain, twin = _both(module, batch)
    assert twin is not None and plain.is_whole and twin.is_whole
    assert _told(plain) == _told(twin)
    plans = [plan_weights(found, 2, styles_for(module, None)) for found in (plain, twin)]
    assert plans[0] == plans[1]
    tokens = [plan_tokens(found, names_of(batch), 2, None) for found in (plain, twin)]
    assert tokens[0] == tokens[1] and any(dim is not None for dim in tokens[0].dims)
    assert twin.heard is not None and twin.heard == plain.heard


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, C), nn.Linear(C, 16)
        self.layer = nn.TransformerEncoderLayer(C, 2, 16, batch_first=True)
        self.norm = nn.BatchNorm1d(C)
        self.rnn = nn.GRU(C, C, batch_first=True)
        self.conv = nn.Conv1d(C, C, 3, padding=1)

    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        return h

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.layer(self.embed(batch), src_key_padding_mask=batch == 0)
        h = self.norm(self.conv(h.mT)).mT + self.rnn(h)[0]
        h = self.middle(h, batch)
        wanted = batch.roll(-1, 1).masked_fill(batch == 3, -100)
        return nn.functional.cross_entropy(self.head(h)[:, :-1].flatten(0, 1), wanted[:, :-1].flatten())


class Writes(Model):
    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        mask = torch.zeros(h.shape)
        mask[batch == 2] = 1.0
        mask[:, 0] = h[:, 0]
        h = h.clone()
        h[:, 1] += mask[:, 2]
        h *= torch.rand_like(batch, dtype=h.dtype)[..., None]
        return h - h.sum(1, keepdim=True) if h.sum() > 0 and batch.sum() > 0 else h / h.detach().max().item()


def _ids() -> Tensor:
    return torch.randint(1, 16, (4, TOKENS))


@long("Model")
@pytest.mark.parametrize("kind", [Model, Writes])
def test_a_split_run_tells_what_a_whole_one_would(kind: Any) -> None:
    _assert_alike(kind(), _ids())


@slow(but=["hf_whisper"])
@pytest.mark.parametrize("name", NAMES)
def test_of_a_users_model_too(name: str) -> None:
    case = MODELS[name]
    data = case.data(0)
    module = case.module()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    _assert_alike(module, default_collate([data[n] for n in range(case.batch_size)]))


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class OutOfSight(Model):
    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        return Identity.apply(h)  # type: ignore[no-any-return]


class Mapped(Model):
    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        return torch.vmap(lambda x: x * 2)(h)


class Hooked(Model):
    calls = 0

    def middle(self, h: Tensor, batch: Tensor) -> Tensor:
        h = h.detach().requires_grad_()
        with torch.enable_grad():
            return h + torch.autograd.grad(h.square().sum(), h)[0]


@pytest.mark.parametrize("kind", [OutOfSight, Mapped, Hooked])
def test_where_it_can_not_be_known_nothing_is_told(kind: Any) -> None:
    _, twin = _both(kind(), _ids())
    assert twin is None
