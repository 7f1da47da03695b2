"""What a sequence axis is given: what can't be is refused before training, on all ranks alike, with the user's own
names and numbers; what it doesn't know runs on gathered tensors with a warning; neither is computed on a part alone.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_par import SequenceParallelStrategy
from lightning_par.sequence.part import TokensPart
from lightning_par.sequence.table import input_rows
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

C, HEADS, SAMPLES = 8, 2, 12


class Mix(nn.Module):
    """Attention with as many heads as asked for."""

    def __init__(self, heads: int = HEADS, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.attend(q, k, v).transpose(1, 2).flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Net(LightningModule):
    """A small language model; ``make`` builds what follows its attention."""

    def __init__(self, make: Callable[[], nn.Module] = nn.Tanh, heads: int = HEADS) -> None:
        super().__init__()
        self.embed, self.mix, self.other = nn.Embedding(16, C), Mix(heads), make()
        self.head = nn.Linear(C, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.other(self.mix(self.embed(ids))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = self.ids(batch)
        return F.cross_entropy(self(ids[:, :-1]).transpose(1, 2), ids[:, 1:])

    def ids(self, batch: Any) -> Tensor:
        return batch  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


# --------------------------------------------------------------------------------- functions that the rules don't know


class Flex(Mix):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():  # torch's flex attention has no backward on CPU
            return flex_attention(q.detach(), k.detach(), v.detach(), score_mod=_recent)  # type: ignore[return-value]


def _recent(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q >= k, score - 0.1 * (q - k), -torch.inf)


class Mapped(nn.Module):
    """Each sample minus its mean over the tokens, by `torch.vmap`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda one: one - one.mean(0))(x)


@torch.library.custom_op("sequence_input_test::running", mutates_args=())
def running(x: Tensor) -> Tensor:
    return x.cumsum(1)


running.register_fake(torch.empty_like)
running.register_autograd(lambda ctx, grad: grad.flip(1).cumsum(1).flip(1))


class Custom(nn.Module):
    """A custom operator that runs along the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.1 * running(x)


class Running(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.flip(1).cumsum(1).flip(1)


class Function(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.1 * Running.apply(x)  # type: ignore[no-any-return]


running_mean = Running.apply  # as torch's own examples have it


class Named(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return running_mean(x)  # type: ignore[no-untyped-call, no-any-return]


class ToScript(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.cumsum(1) / 7.0


class Blind(Net):
    """Attention that sees what comes later, too, of one head."""

    def __init__(self) -> None:
        super().__init__(heads=1)
        self.mix.causal = False


def scripted() -> nn.Module:
    return torch.jit.script(ToScript())  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------------------- modules run in another way


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(C), Mix(), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.gelu(self.mix(self.norm(x))))


class Again(Block):
    """Recomputed in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Reentrant(Again):
    reentrant = True


def compiled(in_place: bool) -> nn.Module:
    block = Block()
    if not in_place:
        return torch.compile(block, backend="aot_eager")  # type: ignore[return-value]
    block.compile(backend="aot_eager")
    return block


class Hooked(Block):
    """Hooks that read and change what goes in and out, along the tokens, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(1, keepdim=True),))
        self.out.register_forward_hook(lambda _, args, out: out * (1 + out.detach().abs().mean()))
        self.norm.register_full_backward_hook(lambda _, given, made: (given[0].clamp(-1e-3, 1e-3),))
        self.mix.register_forward_hook(self.keep)
        self.seen: list[float] = []

    def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.seen.append(out.std().item())


# -------------------------------------------------------------------------------------------------------------- batches


@dataclass
class Open:
    ids: Tensor
    names: list[str]


class Sized(MutableMapping[str, Tensor]):
    """Its constructor is told what no item says, as a TensorDict's is, which then goes by another size."""

    def __init__(self, items: Any = (), size: int = 0) -> None:
        self.items_by_key, self.size = dict(items), size

    def __getitem__(self, key: str) -> Tensor:
        return self.items_by_key[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.items_by_key = {**self.items_by_key, key: value}

    def __delitem__(self, key: str) -> None:
        self.items_by_key = {k: v for k, v in self.items_by_key.items() if k != key}

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_by_key)

    def __len__(self) -> int:
        return len(self.items_by_key)


class Listed(list[Tensor]):
    """A list that knows more than its items."""

    size = 0


class Pair(NamedTuple):
    ids: Tensor
    mask: Tensor


class OfOpen(Net):
    def ids(self, batch: Any) -> Tensor:
        assert type(batch) is Open and batch.names == ["a"] * len(batch.ids)
        return batch.ids


class OfSized(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return Sized(batch, len(batch["ids"]))

    def ids(self, batch: Any) -> Tensor:
        assert type(batch) is Sized
        return batch["ids"] * (torch.arange(batch.size)[:, None] > 0)


class OfListed(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        made = Listed([batch["ids"]])
        made.size = len(made[0])
        return made

    def ids(self, batch: Any) -> Tensor:
        assert type(batch) is Listed
        return batch[0] * (torch.arange(batch.size)[:, None] > 0)


class OfPair(Net):
    def ids(self, batch: Any) -> Tensor:
        assert type(batch) is Pair
        return batch.ids * batch.mask


class OfNested(Net):
    def ids(self, batch: Any) -> Tensor:
        assert batch["text"]["names"] == ["a"] * len(batch["text"]["ids"])
        return batch["text"]["ids"] * batch["masks"][1]


class OfEncoding(Net):
    def ids(self, batch: Any) -> Tensor:
        return batch.input_ids * batch["attention_mask"]


class OfUserDict(Net):
    def ids(self, batch: Any) -> Tensor:
        return batch["ids"]


class Adds(Net):
    """The step puts tensors of its own into its batch."""

    def ids(self, batch: Any) -> Tensor:
        batch["mask"] = batch["ids"] > 2
        batch["ids"] = batch["ids"] * batch["mask"]
        batch["last"] = batch["ids"][:, -1]
        return batch["ids"]


class HookAdds(Net):
    """So does a hook before it, ahead of what was there."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        ids = batch.pop("ids")
        batch.update(mask=ids > 2, ids=ids)

    def ids(self, batch: Any) -> Tensor:
        return batch["ids"] * batch["mask"]


class OfStrings(Net):
    def ids(self, batch: Any) -> Tensor:
        ids, names = batch
        assert len(names) == len(ids) and set(names) == {"a"}
        return ids


class Vectors(LightningModule):
    """A model without a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch.double()), batch.sum(1) % 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def encoding(ids: Tensor) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": ids, "attention_mask": (ids > 2).long()})


BATCHES: dict[str, Callable[[Tensor], Any]] = {
    "": lambda ids: ids,
    "open": lambda ids: Open(ids, ["a"] * len(ids)),
    "pair": lambda ids: Pair(ids, (ids > 2).long()),
    "nested": lambda ids: {"text": {"ids": ids, "names": ["a"] * len(ids)}, "masks": [ids > 5, ids > 2]},
    "encoding": encoding,
    "dict": lambda ids: {"ids": ids},
    "userdict": lambda ids: UserDict(ids=ids),
    "strings": lambda ids: [ids, ["a"] * len(ids)],
}


def ids(lengths: tuple[int, ...] = (9,)) -> list[Tensor]:
    """Batches of 4 samples, one after another of these lengths."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(16, (4, lengths[i % len(lengths)]), generator=generator) for i in range(SAMPLES // 4)]


# ----------------------------------------------------------------------------------------------------------------- runs


class Answer(NamedTuple):
    error: str
    said: str  # warnings and what was logged
    losses: list[float]
    weights: dict[str, Tensor]
    seen: list[float]  # by hooks
    rows: list[str]  # of the start-up table


def _world() -> int:
    # Lightning takes WORLD_SIZE away at the end of a run; the process group stays.
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def run(module: Callable[[], LightningModule], batches: str = "", lengths: Any = (9,), **options: Any) -> Answer:
    """Three steps on this world's ranks, or why not."""
    world, error = _world(), ""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_par")
    logger.addHandler(handler)
    torch.manual_seed(1)
    net: Any = None
    strategy: Any = None
    losses: list[float] = []
    rows: list[str] = []

    def planned(trainer: Any, module: Any) -> None:
        plan = trainer.strategy.parts.of(TokensPart).plan if world > 1 else None
        rows.extend(f"{name}: {held}" for name, _, held in ([] if plan is None else input_rows(plan)))

    def kept(trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        losses.append(outputs["loss"].item())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            strategy = SequenceParallelStrategy(**options) if world > 1 else "auto"
            trainer = Trainer(
                accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, precision="64-true", logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                callbacks=[LambdaCallback(on_train_start=planned, on_train_batch_end=kept)],
            )  # fmt: skip
            net = module()
            data = [BATCHES[batches](x) for x in ids(lengths)]
            trainer.fit(net, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
            assert trainer.global_step == 3
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
    logger.removeHandler(handler)
    said += [str(w.message) for w in caught]
    seen = [] if net is None else getattr(getattr(net, "other", None), "seen", [])
    state = {} if net is None else {k: copy.deepcopy(v.detach()) for k, v in net.state_dict().items()}
    return Answer(error, "\n".join(said), losses, state, seen, rows)


def line(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the line of ``function`` that holds ``text``."""
    lines, first = inspect.getsourcelines(function)
    return f"test_input.py:{first + next(i for i, one in enumerate(lines) if text in one)}"


NAMES = """'auto', 'ring', 'ulysses', 'all_gather' or a dict as {"ulysses": 2, "ring": 2}"""
ONE_HEAD = "1 query head can't be spread over 2 ranks evenly, which attention='ulysses' asks for"

REFUSED: dict[str, tuple[Callable[[], LightningModule], dict[str, Any], list[str]]] = {
    "an unknown attention": (Net, dict(attention="rings"), [NAMES, "got 'rings'"]),
    "an attention of no name": (Net, dict(attention=True), ["TypeError", NAMES, "got True"]),
    "a product for more ranks": (
        Net,
        dict(attention={"ulysses": 2, "ring": 2}),
        ["is for 2 * 2 = 4 ranks, but the sequence is spread over 2", "Write sizes whose product is 2"],
    ),
    "an unknown size": (Net, dict(attention={"ulysses": 2, "rings": 1}), ["sizes 'ulysses' and 'ring'", "'rings': 1"]),
    "a size too few": (Net, dict(attention={"ulysses": 2}), ["sizes 'ulysses' and 'ring', got {'ulysses': 2}"]),
    "a size of nothing": (Net, dict(attention={"ulysses": 0, "ring": 2}), ["the positive sizes"]),
    "too few heads": (
        partial(Net, nn.Tanh, 1),
        dict(attention="ulysses"),
        [line(Mix.attend, "scaled_dot"), ONE_HEAD, "write attention='ring' or attention='auto'"],
    ),
    "too few heads and no mask": (Blind, dict(attention="ulysses"), [line(Mix.attend, "scaled_dot"), ONE_HEAD]),
    "a dim that no input has": (
        Net, dict(sequence_dim=3), ["sequence_dim=3, but no tensor of the batch has such a dim: the batch (4, 9)"]
    ),
    "a dim of what is not in the batch": (
        OfNested,
        dict(batches="nested", sequence_dim={"text.id": 1}),
        ["sequence_dim names 'text.id', which is not in the batch: text.ids (4, 9), masks[0] (4, 9)"],
    ),
    "a dim that an input doesn't have": (
        OfNested,
        dict(batches="nested", sequence_dim={"text.ids": 2}),
        ["sequence_dim['text.ids'] = 2, but 'text.ids' has the shape (4, 9)"],
    ),
    "a dim that is a string": (Net, dict(sequence_dim="1"), ["TypeError", "must be an int, or a dict", "got '1'"]),
    "a size that doesn't divide": (
        Net, dict(sequence_parallel_size=3), ["sequence_parallel_size=3", "the Trainer starts 2 processes"]
    ),
    "sizes that multiply to more": (
        Net,
        dict(sequence_parallel_size=2, data_parallel_size=2),
        ["data_parallel_size=2 * sequence_parallel_size=2 = 4", "the Trainer starts 2 processes"],
    ),
}  # fmt: skip

GATHERED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "flex attention": (Flex, "`flex_attention` has no local rule and gathers"),
    "vmap": (Mapped, "`vmap` has no local rule and gathers"),
    "custom operator": (Custom, "`running.default` has no local rule and gathers"),
    "autograd function": (Function, "`Running` has no local rule and gathers"),
    "autograd function of another name": (Named, "`Running` has no local rule and gathers"),
    "scripted module": (scripted, "`forward` has no local rule and gathers"),
    "reentrant checkpointing": (Reentrant, "`CheckpointFunction` has no local rule and gathers"),
}

ALLOWED: dict[str, tuple[Callable[[], LightningModule], dict[str, Any]]] = {
    "one head": (partial(Net, nn.Tanh, 1), {}),
    "lengths down to one token": (Net, dict(lengths=(9, 3, 2))),
    "one token from the start": (Net, dict(lengths=(2, 9, 2))),
    "lengths, ulysses": (Net, dict(lengths=(9, 2, 4), attention="ulysses")),
    "lengths, gather": (Net, dict(lengths=(9, 2, 4), attention="all_gather")),
    "a dim by name": (OfNested, dict(batches="nested", sequence_dim={"text.ids": 1})),
    "a dim of no use": (Net, dict(sequence_dim=0)),
    "no sequence": (Vectors, {}),
    "checkpointing": (partial(Net, Again), {}),
    "compiled": (partial(Net, partial(compiled, False)), {}),
    "compiled in place": (partial(Net, partial(compiled, True)), {}),
    "hooks": (partial(Net, Hooked), {}),
    "a dataclass": (OfOpen, dict(batches="open")),
    "a named tuple": (OfPair, dict(batches="pair")),
    "nested": (OfNested, dict(batches="nested")),
    "an encoding": (OfEncoding, dict(batches="encoding")),
    "a user's dict": (OfUserDict, dict(batches="userdict")),
    "strings": (OfStrings, dict(batches="strings")),
    "a mapping with a size": (OfSized, dict(batches="dict")),
    "a list with a size": (OfListed, dict(batches="dict")),
    "a batch that the step adds to": (Adds, dict(batches="dict")),
    "a batch that a hook adds to": (HookAdds, dict(batches="dict")),
}


Asked = Callable[[str], list[dict[str, Any]]]


def _all(names: list[str]) -> dict[str, Answer]:
    known = {name: (partial(Net, make), {}) for name, (make, _) in GATHERED.items()}
    cases: dict[str, Any] = {**REFUSED, **known, **ALLOWED}
    return {name: run(module, **options) for name, (module, options, *_) in cases.items() if name in names}


@pytest.fixture(scope="module")
def refusals(pool: Pool, asked: Asked) -> list[dict[str, Answer]]:
    """Of both ranks, one case after another: a run that was refused leaves the next one as it was."""
    rows = asked(test_what_cant_be_is_refused_alike_on_all_ranks_before_training.__name__)
    return pool.run(2, _all, [row["name"] for row in rows])


@pytest.fixture(scope="module")
def trained(pool: Pool, asked: Asked) -> tuple[dict[str, Answer], list[dict[str, Answer]]]:
    """On one device, and on both ranks."""
    tests = (test_what_may_be_trains_as_on_one_device, test_what_gathers_says_so_on_the_first_rank,
             test_the_table_names_what_the_batch_holds)  # fmt: skip
    names = [row["name"] for test in tests for row in asked(test.__name__)]
    return pool.run(1, _all, names)[0], pool.run(2, _all, names)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_is_refused_alike_on_all_ranks_before_training(name: str, refusals: Any) -> None:
    first, second = (answers[name] for answers in refusals)
    assert first.error == second.error and first.error.startswith(("ValueError: ", "TypeError: "))
    for part in REFUSED[name][2]:
        assert part in first.error
    assert not first.losses and not second.losses


OFTEN = ("flex attention", "scripted module", "autograd function")
"""Slow, or much like others."""


@slow(
    *OFTEN, "lengths, gather", "one token from the start", "compiled", "a dim of no use", "an encoding", "a dataclass"
)
@pytest.mark.parametrize("name", [*GATHERED, *ALLOWED])
def test_what_may_be_trains_as_on_one_device(name: str, trained: Any) -> None:
    expected, *ranks = (answers[name] for answers in (trained[0], *trained[1]))
    assert expected.error == "" and len(expected.losses) == 3
    for answer in ranks:
        assert answer.error == ""
        assert answer.losses == pytest.approx(expected.losses, rel=1e-9)
        assert answer.seen == pytest.approx(expected.seen, rel=1e-8)
        assert answer.weights.keys() == expected.weights.keys()
        for key, weight in expected.weights.items():
            assert (answer.weights[key].double() - weight.double()).abs().max() <= 1e-9, key


@slow(*OFTEN)
@pytest.mark.parametrize("name", GATHERED)
def test_what_gathers_says_so_on_the_first_rank(name: str, trained: Any) -> None:
    first, second = (answers[name].said for answers in trained[1])
    assert first.count(GATHERED[name][1]) == 1 and "has no local rule" not in second


FIELDS = {
    "a dataclass": ["ids"],
    "a named tuple": ["batch[0]", "batch[1]"],
    "nested": ["text.ids", "masks[0]", "masks[1]"],
    "an encoding": ["input_ids", "attention_mask"],
    "a user's dict": ["ids"],
    "strings": ["batch[0]"],
    "a mapping with a size": ["ids"],
    "a list with a size": ["batch[0]"],
    "a batch that the step adds to": ["ids"],
    "a batch that a hook adds to": ["mask", "ids"],
}


@slow("an encoding", "a dataclass")
@pytest.mark.parametrize("name", FIELDS)
def test_the_table_names_what_the_batch_holds(name: str, trained: Any) -> None:
    assert [row.split(":")[0] for row in trained[1][0][name].rows] == FIELDS[name]
    assert all("up to 5 of 9 along dim 1" in row for row in trained[1][0][name].rows)
