"""A trial run goes on where the user's code decides by values that are not there, and ends where one device would."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_par.pipeline.plan.units import choose_units
from lightning_par.pipeline.trial.study import survey
from lightning_par.trial import guesses
from lightning_par.trial.fake_functions import run_on_fakes
from lightning_par.trial.guessed_number import guessed
from lightning_par.trial.guesses import EndlessError, Guesses, Trial, explore
from lightning_par.trial.step import Step as StagedStep
from lightning_par.trial.trial_run import quiet, record_step
from tests.helpers.slow import long, slow

Step = Callable[["Model", Any], Any]
SCALAR = torch.empty((), device="meta")


class Model(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.a, self.b, self.step = nn.Linear(8, 16), nn.Linear(16, 4), step
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)


def any_of(x: Tensor) -> bool:
    return bool(x.any())


def asserts(m: Model, x: Tensor) -> Tensor:
    h = m.a(x)
    assert torch.isfinite(h).all()
    y = m.b(h)
    assert torch.isfinite(y).all() and torch.allclose(y.softmax(-1).sum(-1), torch.ones(4))
    return y.sum()


def raises(m: Model, x: Tensor) -> Tensor:
    h = m.a(x)
    if torch.isnan(h).any() or not torch.isfinite(h).all():
        raise ValueError("not finite")
    torch.testing.assert_close(h, h)
    return m.b(h).sum()


def returns_early(m: Model, x: Tensor) -> Tensor | None:
    h = m.a(x)
    if not torch.isfinite(h).all():
        return None
    return m.b(h).sum()


def asks_by_a_helper(m: Model, x: Tensor) -> Tensor:
    h = m.a(x)
    if any_of(torch.isnan(h)):
        raise ValueError("not a number")
    assert any_of(torch.isfinite(h))
    return m.b(h).sum()


def asserts_in_a_long_loop(m: Model, x: Tensor) -> Tensor:
    for _ in range(120):
        x = (x + 1).relu().tanh().sin().cos().exp().sigmoid().log().abs().sqrt()
        assert torch.isfinite(m.a(x)).all()
    return m.b(m.a(x)).sum()


def numbers(m: Model, x: Tensor) -> Tensor:
    y = m.b(m.a(x))
    value, most = y.pow(2).mean().item(), y.argmax().item()
    if math.isnan(value) or value > 1e6 or value < 0:
        raise ValueError("off")
    m.kept.append(value)
    assert len(f"{y.sum():.3f} {y}") > 3
    return y.sum() * (1 if value > 0.5 else 2) + sum(y[0, j] for j in range(min(most, 4)))


def arrays(m: Model, x: Tensor) -> Tensor:
    y = m.b(m.a(x))
    order = np.argsort(y[:, 0].detach().cpu().numpy())
    return y[order].sum() + y[sorted(y[:, 1].argsort().tolist())].sum()


def checked_distributions(m: Model, x: Tensor) -> Tensor:
    loc, scale = m.b(m.a(x)).chunk(2, -1)
    normal = distributions.Normal(loc, F.softplus(scale))
    mixture = distributions.MixtureSameFamily(
        distributions.Categorical(logits=loc), distributions.Normal(loc, F.softplus(scale))
    )
    prior = distributions.Normal(torch.zeros_like(loc), torch.ones_like(loc))
    likelihood = normal.log_prob(x[:, :2]).mean() + mixture.log_prob(x[:, 0]).mean()
    return likelihood + distributions.kl_divergence(normal, prior).mean()


def values_of_the_batch(m: Model, x: Tensor) -> Tensor:
    lengths = (x[:, 0] > 0).long() + 2
    if lengths.min() < 2 or lengths.max().item() > 3:
        raise ValueError("lengths")
    assert (lengths <= 3).all()
    classes, inverse = lengths.unique(return_inverse=True)
    sums = torch.zeros(len(classes), 16).index_add_(0, inverse, m.a(x))
    parts = [m.a(x)[k, :n].sum() for k, n in enumerate(lengths.tolist())]
    return m.b(sums).sum() + m.a(x)[x[:, 1] > 0].sum() + torch.stack(parts).sum()


def shapes_by_values(m: Model, x: Tensor) -> Tensor:
    h = m.a(x)
    index = (h > 0).nonzero()
    return m.b(h[torch.where(h[:, 0] > 0)]).sum() + h[index[:, 0], index[:, 1]].sum() + h.masked_select(h > 1).sum()


def writes_into_new_tensors(m: Model, x: Tensor) -> Tensor:
    out, views = x.new_zeros(4, 4), x.new_zeros(4, 4)
    for k in range(4):
        out[k] = m.b(m.a(x[k]))
        views[k].copy_(out[k])
    if out.sum() == 0 or not views.any():  # zeros that were not written into would say so
        raise ValueError("nothing was written")
    return (out + views).sum()


def penalty(m: Model, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = m.b(m.a(x))
    assert torch.isfinite(y).all()
    (gradient,) = torch.autograd.grad(y[(y > 0).nonzero()[:, 0]].sum(), x, create_graph=True)
    return gradient.norm()


def while_large(m: Model, x: Tensor) -> Tensor:
    h = m.a(x)
    while h.abs().max() > 1:
        h = h / 2
    return m.b(h).sum()


def while_not_small(m: Model, x: Tensor) -> Tensor:
    h = m.a(x)
    while not h.abs().max() < 1:
        h = h / 2
    return m.b(h).sum()


def while_two(m: Model, x: Tensor) -> Tensor:
    h = m.a(x)
    while not (h.max() < 1 and h.min() > -1):
        h = h / 2
    return m.b(h).sum()


def while_number(m: Model, x: Tensor) -> Tensor:
    h = m.a(x)
    while h.norm().item() > 1e-3:
        h = h / 2
    while float(h.norm()) < 5:
        h = h * 2
    while np.abs(h.detach().numpy()).max() > 1e-3:
        h = h / 2
    return m.b(h).sum()


def until_it_does(m: Model, x: Tensor) -> Tensor:
    h = m.a(x)
    while True:
        try:
            if not h.max() < 1:
                raise ValueError("again")
            break
        except Exception:
            h = h / 2
    return m.b(h).sum()


STEPS: list[Step] = [
    asserts, raises, returns_early, asks_by_a_helper, asserts_in_a_long_loop, numbers, arrays, checked_distributions,
    values_of_the_batch, shapes_by_values, writes_into_new_tensors, penalty, while_large, while_not_small, while_two,
    while_number, until_it_does,
]  # fmt: skip


@long("while_number")
@slow(
    "asks_by_a_helper",
    "asserts_in_a_long_loop",
    "numbers",
    "raises",
    "shapes_by_values",
    "values_of_the_batch",
    "while_not_small",
    "while_two",
)
@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_trial_comes_to_the_end_of_a_step_that_decides_by_values(step: Step) -> None:
    torch.manual_seed(1)
    model, batch = Model(step), torch.randn(4, 8)
    before = batch.clone()
    assert step(model, batch.clone()) is not None
    model.kept.clear()
    recording = record_step(model, "training_step", batch)
    assert recording.is_whole, (recording.stopped, recording.met)
    assert model.kept == [] and torch.equal(batch, before)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.rnn, self.b = nn.Linear(8, 6), nn.LSTM(6, 6, 2, batch_first=True), nn.Linear(6, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths = batch
        packed = pack_padded_sequence(self.a(x), lengths, batch_first=True, enforce_sorted=False)
        out, (hidden, _) = self.rnn(packed)
        return self.b(pad_packed_sequence(out, batch_first=True)[0]).sum() + hidden.sum()


def test_packed_sequences_have_the_lengths_of_the_batch() -> None:
    recording = record_step(Packed(), "training_step", (torch.randn(3, 5, 8), torch.tensor([2, 4, 3])))
    assert recording.is_whole, recording.stopped
    out = next(event.outputs[0] for event in recording.events if event.name == "_pad_packed_sequence")
    assert out.shape == (3, 4, 6)


class Asking(nn.Module):
    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(8, 8), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(self.layer(x))


def halves(x: Tensor) -> Tensor:
    while x.abs().max() > 1:
        x = x / 2
    return x


def halves_by_number(x: Tensor) -> Tensor:
    while x.norm().item() > 1:
        x = x / 2
    return x


def checks(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all()
    if not torch.isfinite(x.sum()):
        raise ValueError("not finite")
    return x


@pytest.mark.parametrize("ask", [halves, halves_by_number, checks])
def test_a_pipeline_leaves_a_module_whole_that_decides_by_values(ask: Callable[[Tensor], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Asking(ask), nn.Linear(8, 8)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.last(self.first(batch)).sum()
            assert torch.isfinite(loss)
            return loss

    cpu = torch.device("cpu")
    root = survey(StagedStep(Net(), "training_step", torch.randn(4, 8), (0,), nullcontext, True, cpu)).root
    assert choose_units(root, 3) == ("first", "last")


def test_a_loop_that_no_answer_ends_stops_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "_ENDLESS", ((30, 0),))
    monkeypatch.setattr(guesses, "_PATIENT", ((300, 0),))

    def forever(m: Model, x: Tensor) -> Tensor:
        h = m.a(x)
        while True:
            h = h / 2 if h.max() > 1 else h * 2

    recording = record_step(Model(forever), "training_step", torch.randn(4, 8))
    assert recording.stopped is not None and "again and again" in recording.stopped and __file__ in recording.stopped


def test_what_a_trial_guessed_serves_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Guesses] = []
    monkeypatch.setattr(guesses, "Guesses", lambda patterns=None: runs.append(Guesses(patterns)) or runs[-1])
    model, batch = Model(asserts), torch.randn(4, 8)
    patterns = record_step(model, "training_step", batch).patterns
    searched = len(runs)
    assert record_step(model, "training_step", batch, patterns=patterns).is_whole
    assert searched > 1 and len(runs) == searched + 1


def test_a_question_asked_often_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Guesses] = []
    monkeypatch.setattr(guesses, "Guesses", lambda patterns=None: runs.append(Guesses(patterns)) or runs[-1])

    def asks(m: Model, x: Tensor) -> Tensor:
        for _ in range(40):  # by now Python runs what it made of this code
            bool(m.a(x).max() == 0)
        return m.b(m.a(x)).sum()

    assert record_step(Model(asks), "training_step", torch.randn(4, 8)).is_whole
    assert [*runs[0].asked.values()] == [40] and len(runs[0].decided) == 1


def test_a_loop_with_checks_in_it_is_ended_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that decodes until all are done: where other answers end it, those to the checks stay what they were."""
    runs: list[Guesses] = []
    monkeypatch.setattr(guesses, "Guesses", lambda patterns=None: runs.append(Guesses(patterns)) or runs[-1])

    def decodes(m: Model, x: Tensor) -> Tensor:
        h, steps = m.a(x), []
        while not (h.abs() < 1).all():
            assert not h.isnan().any()
            assert not h.isinf().any()
            assert not (h > 1e9).any()
            assert not (h < -1e9).any()
            h = h / 2
            steps.append(h)
        return m.b(torch.stack(steps)).sum()

    assert record_step(Model(decodes), "training_step", torch.randn(4, 8)).is_whole
    assert all(sum(run.asked.values()) < 2_000 for run in runs)


class Writes(Model):
    validation_step = Model.training_step


@long()
def test_a_loop_that_generates_is_known_by_a_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Guesses] = []
    monkeypatch.setattr(guesses, "Guesses", lambda patterns=None: runs.append(Guesses(patterns)) or runs[-1])

    def writes(m: Model, x: Tensor) -> Tensor:
        tokens = x
        while not bool((tokens == 0).any()):
            y = x
            for _ in range(200):
                y = m.b(m.a(y)).repeat(1, 2)
            tokens = torch.cat([tokens, y], 1)
        assert tokens.shape[1] > 800
        return tokens

    found = record_step(Writes(writes), "validation_step", torch.randn(4, 8))
    assert found.met_all and "again and again" in str(found.stopped)
    assert len(runs) == 1 and [*runs[0].asked.values()] == [9]


@long()
def test_a_question_of_each_layer_is_no_loop() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(40))

        def validation_step(self, x: Tensor, batch_idx: int) -> Tensor:
            for layer in self.layers:
                for _ in range(60):
                    x = layer(x)
                x = x.nan_to_num() if x.isnan().any() else x
            return x

    assert record_step(Deep(), "validation_step", torch.randn(2, 4)).is_whole


def test_a_question_is_answered_by_its_place() -> None:
    def ask(told: Guesses) -> list[bool]:
        return [told.read("__bool__", SCALAR) for _ in range(3)]

    def run(told: Guesses) -> Trial[Any]:
        answers = ask(told)
        return Trial(answers, told, (float(sum(answers)),), all(answers))

    assert ask(Guesses()) == [False] * 3 and explore(run).value == [True] * 3


def test_reads_give_what_torch_gives() -> None:
    for dtype in (torch.float32, torch.int64, torch.bool):
        x, real = torch.empty(2, 3, dtype=dtype, device="meta"), torch.ones(2, 3, dtype=dtype)
        array = Guesses().read("numpy", x)
        assert array.shape == (2, 3) and array.dtype == real.numpy().dtype
        assert type(Guesses().read("tolist", x)[0][0]) is type(real.tolist()[0][0])
        one = Guesses().read("item", x)
        assert isinstance(one, type(real[0, 0].item()))
    assert range(Guesses().read("__index__", SCALAR)) == range(1)
    assert Guesses().read("__format__", SCALAR, (SCALAR, ".2f")) == "1.00"
    with pytest.raises(TypeError, match="unsupported format string"):
        Guesses().read("__format__", x, (x, ".2f"))


def test_a_guessed_number_asks_before_it_decides() -> None:
    asked: list[bool] = []

    def decide(natural: bool) -> bool:
        asked.append(natural)
        return not natural

    number = guessed(2.0, decide)
    assert (1 - number) / 2 == -0.5 is False or asked == [True]
    assert not number > 1 and number < 1 and not number and asked[-3:] == [True, False, True]
    assert type(pickle.loads(pickle.dumps(number))) is float and copy.deepcopy([number])[0] is number
    whole = guessed(3, decide)
    assert list(range(whole)) == [0, 1, 2] and int(whole) == 3 and f"{number:.1f}" == "2.0" and hash(whole) == 3
    with pytest.raises(TypeError):
        whole < "a"  # noqa: B015
    assert guessed(True, decide) is True


def test_an_endless_question_is_no_exception_of_the_users() -> None:
    told = Guesses()
    with pytest.raises(EndlessError):
        while True:
            try:
                told.read("__bool__", SCALAR)
            except Exception:
                pass


def test_functions_that_fakes_can_not_run_are_run_on_ones() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        x = torch.empty(3, 4, requires_grad=True)
    found, func = run_on_fakes(mode, torch.masked_select, (x * 2, torch.eye(3, 4) > 0), {})
    assert func.__name__ == "masked_select" and func(x, torch.ones(3, 4, dtype=torch.bool)).shape == (12,)
    assert run_on_fakes(mode, torch.mul, (x, x), {})[1] is torch.mul
    assert found.shape == (3,) and found.requires_grad and type(found) is type(x)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert gradient.shape == (3, 4)
    with torch.no_grad():
        assert not run_on_fakes(mode, torch.masked_select, (x, x > 0), {})[0].requires_grad
    with pytest.raises(RuntimeError, match="same reduction dim"), quiet():
        run_on_fakes(mode, torch.matmul, (x, x), {})
