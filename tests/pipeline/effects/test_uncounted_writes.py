"""Tensors that the user's code writes into by ways that no version of theirs counts: `.data`, arrays of numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import from_numpy as imported_from_numpy

from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.trial.code_attributes import TENSORS, Attributes
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.spare_tensors import Spares
from lightning_par.sharded import patches
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.helpers.stages import trainer
from tests.helpers.surface import Net, check, loader, metrics, weights


class Gate(nn.Module):
    """Decides by a buffer, which one stage has, what becomes of gradients, and whether samples need one another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("open", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y - y.mean(0) if self.open > 0 else self.linear(x.detach()) + x


class WritesBetween(Net):
    """Hooks between steps write into what the step reads, as Lightning's `WeightAveraging` does around a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, Gate())
        self.register_buffer("scale", torch.ones(6))
        self.shift = torch.zeros(6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale + self.shift)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.shift.numpy()[:] += 0.01
        self.net[3].open.data.fill_(self.global_step % 3 == 1)  # type: ignore[union-attr]

    def on_after_backward(self) -> None:
        self.scale.data.mul_(1.01)

    def on_validation_epoch_end(self) -> None:
        self.scale.data = self.scale.data * 0.9


class Counts(nn.Module):
    """Keeps plain tensors: an average, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count, self.mean = torch.zeros((), dtype=torch.float64), torch.zeros(8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count.data.add_(1)
            self.mean.data.mul_(0.9).add_(x.data.mean(0), alpha=0.1)
        return self.linear(x) * (1 + self.count) + self.mean


class WritesWithin(Net):
    """A layer and a hook on a gradient write."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, Counts())
        self.register_buffer("norms", torch.zeros(8))
        self.number = torch.zeros((), dtype=torch.float64)
        self.seen: list[Any] = []

    def _watch(self, grad: Tensor) -> Tensor:
        self.norms.data.lerp_(grad.abs().mean(0), 0.1)
        self.number.data = self.number + 1
        return grad * (1 + self.norms)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net(batch[0])
        x.register_hook(self._watch)
        return F.cross_entropy(self.head(x), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        counts: Any = self.net[3]
        self.seen.append([x.clone() for x in (self.number, counts.count, counts.mean)])


def _fit(kind: Callable[[], Net]) -> Any:
    module, t = kind(), trainer(max_epochs=2, microbatches="auto")
    t.fit(module, loader(16), loader(8, 1))
    return getattr(module, "seen", None), weights(module), metrics(t)


@long()
@slow("WritesWithin")
@pytest.mark.parametrize("kind", [WritesBetween, WritesWithin])
def test_what_is_written_is_one_devices(pool: Pool, kind: type[Net]) -> None:
    check(pool, _fit, kind)


def test_copies_are_of_what_there_is_once_others_have_run() -> None:
    x, spares = torch.zeros(2), Spares()
    first = spares.of([[x]])[id(x)]
    assert spares.of([[x]])[id(x)] is first
    x.numpy()[:] = 1
    spares.forget()
    assert torch.equal(spares.of([[x]])[id(x)], torch.ones(2))


def test_what_is_written_is_told_by_what_it_was() -> None:
    module = nn.Linear(2, 2)
    module.seen = [torch.zeros(2), torch.full((1,), torch.nan), torch.zeros(2)]  # type: ignore[assignment]
    state = Snapshot([("self", module)]).copy_tensors().compare_contents()
    module.seen[0].data.add_(1)  # type: ignore[index]
    assert [*state.left()["self.seen"].inplace] == [0]  # type: ignore[attr-defined]
    state.restore()
    assert torch.equal(module.seen[0], torch.zeros(2))  # type: ignore[index, arg-type]


def test_ranks_tell_what_small_tensors_hold() -> None:
    module = WritesBetween()
    attributes = Attributes(module, ["net.0", "net.3", "head"])
    attributes.hear([attributes.tensors.told()])
    module.net[3].open.data.fill_(1)  # type: ignore[union-attr]
    told = attributes.tensors.told()
    assert list(told.values()) == [([1.0], True)]
    attributes.hear([told])
    assert attributes.changed_since({TENSORS}) == tuple((place, "[1.0]") for place in told)
    assert [*attributes.tensors.told().values()] == [([1.0], False)]


class Arrays(Net):
    """The step meets what it holds as arrays of numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = torch.zeros(3), torch.zeros(70_000)
        self.many, self.lots = ([torch.zeros(2) for _ in range(count)] for count in (100, 1100))
        self.array = np.zeros(70_000)


READS: dict[str, Callable[[Any], Any]] = {
    "small": lambda m: m.small.numpy(),
    "large": lambda m: m.large.numpy(),
    "a view": lambda m: m.large[2:].numpy(),
    "asked by numpy": lambda m: np.asarray(m.large),
    "one of many": lambda m: m.many[3].numpy(),
    "one of lots": lambda m: m.lots[1050].numpy(),
    "of an array": lambda m: torch.from_numpy(m.array),
    "of a part of one": lambda m: torch.from_numpy(m.array[5:]),
    "by another name": lambda m: imported_from_numpy(m.array),
    "as a tensor": lambda m: torch.as_tensor(m.array),
    "as a tensor of a part": lambda m: torch.as_tensor(data=m.array[5:], dtype=torch.float64),
    "as an array's": lambda m: torch.asarray(m.array),
    "there and back": lambda m: torch.from_numpy(m.large.numpy()),
}


@pytest.mark.parametrize("read", READS)
def test_arrays_may_be_read_and_not_written(read: str) -> None:
    module = Arrays()
    watch = Watch(module, [("", module)])
    with patches.SHARDED.installed():
        for runs in (watch.undone, watch.told):
            with runs():
                float(READS[read](module).sum())
                np.asarray(module.large, dtype=np.float64)[:] = 1  # copies
                torch.as_tensor(module.array, dtype=torch.float32)[0] = 1
                torch.tensor(module.array)[0] = 1
            with pytest.raises(RuntimeError, match=r"that its runs may only read: (self\.array, )?self\.\w+"), runs():
                READS[read](module)[0] += 1
        between = module.large.numpy()
        between[0] = 1
        torch.from_numpy(module.array)[0] = 1
        assert module.large[0] == module.array[0] == 1
        assert module.small.numpy().flags.writeable


class Writes(Arrays):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.small.numpy()[0] += 1
        return super().training_step(batch, batch_idx)


def test_a_step_that_writes_into_an_array_of_a_tensor_is_refused(pool: Pool) -> None:
    """Each run of it would, or none that counts."""
    with pytest.raises(RanksFailedError, match=r"may only read: (self\.array, )?self\.small"):
        pool.run(2, _fit, Writes)
