"""`lightning_par.check` and its command line: equal where equal, else what differs by name, or the refusal."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_par
from lightning_par import PipelineParallelStrategy, pl
from lightning_par import __main__ as command
from lightning_par.strategies.namespace import LIGHTNING
from lightning_par.verdict import Finding, LayoutVerdict, Verdict, processes, read_layouts
from tests.helpers.configured import configured
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

ROOT = Path(__file__).parents[2]
AXES = ["tensor_parallel", "pipeline_parallel", "sequence_parallel"]


class Net(LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.down(self.hidden(F.gelu(self.up(self.norm(x))))), y)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("own", loss * 2)
        return loss

    def hidden(self, x: Tensor) -> Tensor:
        return x

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class ReadsRank(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return x * 1.001 if dist.is_initialized() and str(dist.get_rank()) != "0" else x


class _Remembers(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _Remembers.calls += 1
        return grad * (1 if _Remembers.calls == 1 else 1.01)


class Remembers(Net):
    """Its backward is another one the second time: a step in microbatches calls it more often."""

    def hidden(self, x: Tensor) -> Tensor:
        return _Remembers.apply(x)


class SpoilsGradient(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grad = self.norm.weight.grad
        if grad is not None and dist.is_initialized() and str(dist.get_rank()) != "0":
            grad.mul_(1 + 1e-7)


class OnOneRank(Net):
    """What rank 1 does, and no other."""

    def do(self) -> None:
        raise ValueError("rank 1 can't")

    def hidden(self, x: Tensor) -> Tensor:
        if self.trainer.training and self.trainer.world_size > 1 and self.trainer.global_rank == 1:
            self.do()
        return x


class Dies(OnOneRank):
    def do(self) -> None:
        os._exit(3)


class Fails(Net):
    def hidden(self, x: Tensor) -> Tensor:
        raise KeyError("no such key")


class Casts(Net):
    """What ranks sum up, they sum in float32."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, weight = (x.to(torch.float32) for x in (self.up(batch[0]), self.down.weight))
        return F.mse_loss(F.linear(hidden, weight).to(batch[1].dtype), batch[1])


class Rounds(Net):
    """As attention in Hugging Face's "eager" does, where no cast is seen."""

    def hidden(self, x: Tensor) -> Tensor:
        return F.softmax(x, -1, dtype=torch.float32).to(x.dtype)


class OfTheOther(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = vars(Net())["_modules"].values()

    training_step, hidden, configure_optimizers = Net.training_step, Net.hidden, Net.configure_optimizers


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, 8, generator=generator), torch.randn(4, 6, 8, generator=generator)


def make_loader() -> DataLoader:
    samples = [(x, y) for _ in range(4) for x, y in zip(*make_batch())]
    return DataLoader([(x * (i + 1), y) for i, (x, y) in enumerate(samples)], batch_size=4)  # type: ignore[arg-type]


def _of_models(name: str) -> Any:
    torch.manual_seed(0)
    case = MODELS[name]
    return case.module(), next(iter(DataLoader(case.data(0), batch_size=case.batch_size)))  # type: ignore[arg-type]


def _check(module: str, layouts: list[Any], batch: Any = None, in_configure_model: bool = False, **options: Any) -> Any:
    """The verdict in a worker. The function can't be pickled, so the worker itself is forked; or the error."""
    make: Any = globals().get(module)
    if make is None:
        made, batch = _of_models(module)
        make = (lambda: configured(lambda: MODELS[module].module())) if in_configure_model else made
        if not in_configure_model:
            made.unpicklable = lambda: None
    else:
        kind, batch = make, batch or make_batch()
        make = lambda: kind()  # noqa: E731
    try:
        return lightning_par.check(make, batch, layouts, **options)
    except RuntimeError as error:
        return str(error)


def _states(verdict: Verdict) -> list[str]:
    return [one.state for one in verdict.layouts]


CASES: list[tuple[str, list[Any]]] = [
    ("gpt_tied", AXES),
    ("gpt_residual_dropout", AXES),
    ("mlp_batch_norm", ["pipeline_parallel", dict(data_parallel_size=2)]),
    ("gan", ["tensor_parallel", "pipeline_parallel"]),
    ("hf_bert", [dict(pipeline_parallel_size=2, tensor_parallel_size=2)]),
]


@long()
@slow(but=["mlp_batch_norm-"])
@pytest.mark.parametrize(("name", "layouts"), CASES, ids=lambda x: str(x) if isinstance(x, str) else "")
def test_modules_that_are_equal_are_found_equal(pool: Pool, name: str, layouts: list[Any]) -> None:
    (verdict,) = pool.run(1, _check, name, layouts)
    assert isinstance(verdict, Verdict) and verdict, f"{verdict}"
    assert _states(verdict) == ["equal"] * len(layouts)
    dropped = [note for note in verdict.notes if note.startswith("Dropout was off for this (")]
    assert len(dropped) == ("dropout" in name)
    apart = [note for note in verdict.notes if "Buffers, of which each copy has its own, are not compared" in note]
    assert len(apart) == ("batch_norm" in name)


@long()
def test_layers_made_in_configure_model_are_checked_and_their_dropout_is_off(pool: Pool) -> None:
    (verdict,) = pool.run(1, _check, "gpt_residual_dropout", ["tensor_parallel"], in_configure_model=True)
    assert verdict and verdict.notes[0].startswith("Dropout was off for this ("), f"{verdict}"


@slow()
def test_dropout_that_stays_on_is_equal_where_one_devices_is_drawn_and_else_the_verdict_says_why(pool: Pool) -> None:
    layouts = [PipelineParallelStrategy(microbatches=2), "pipeline_parallel", "tensor_parallel"]
    (verdict,) = pool.run(1, _check, "gpt_residual_dropout", layouts, dropout=True)
    assert _states(verdict) == ["differs", "equal", "equal"]
    assert verdict.notes == (
        "The step draws random numbers. On shards they are not one device's, nor then are the results. With "
        "draws='one_device' they are.",
    )


@long()
def test_copies_of_the_model_are_compared_with_one_device_that_accumulates(pool: Pool) -> None:
    layouts = [dict(data_parallel_size=2), dict(data_parallel_size=2, tensor_parallel_size=2)]
    verdict, spoiled = pool.run(1, _both_copies, layouts)[0]
    assert verdict, f"{verdict}"
    assert verdict.notes == ("Under data parallelism, one device accumulated gradients over as many batches.",)
    assert [one.ranks for one in verdict.layouts] == ["data 2", "data 2 x tensor 2"]
    assert _states(spoiled) == ["differs"] and "norm.weight" in spoiled.layouts[0].parameters
    assert spoiled.notes[0].startswith("All copies of the model saw the same batch.")


def _both_copies(layouts: list[Any]) -> tuple[Verdict, Verdict]:
    return _check("Net", layouts, make_loader()), _check("ReadsRank", layouts[:1])


def test_a_step_that_reads_its_rank_is_found_with_all_parameters_worst_first(pool: Pool) -> None:
    (verdict,) = pool.run(1, _check, "ReadsRank", ["tensor_parallel", "sequence_parallel"])
    assert not verdict and _states(verdict) == ["differs"] * 2
    for layout in verdict.layouts:
        errors = list(layout.parameters.values())
        assert {*layout.parameters} == {name for name, _ in Net().named_parameters()}
        assert errors == sorted(errors, reverse=True) and 1e-5 < errors[0] < 1e-1
        assert layout.findings[0].what in ("loss", "gradient")
        assert {"clipped gradient", "weight", "optimizer 0 momentum_buffer"} <= {one.what for one in layout.findings}
    text = str(verdict)
    assert "first: loss 0: error" in text and "and 1 more parameter" in text


def test_a_gradient_that_one_rank_alone_has_otherwise_is_named_alone(pool: Pool) -> None:
    (verdict,) = pool.run(1, _check, "SpoilsGradient", ["sequence_parallel"], steps=1)
    (layout,) = verdict.layouts
    assert layout.findings[0].name == "norm.weight" and layout.findings[0].what == "clipped gradient", layout.findings
    assert layout.parameters["norm.weight"] == pytest.approx(1e-7, rel=1)
    assert "float32" in verdict.footer()[-1]


@long()
def test_a_function_with_a_memory_is_found_in_what_lies_below_it(pool: Pool) -> None:
    layouts = [
        PipelineParallelStrategy(microbatches=2, allow_batch_coupling=True, verify=False),
        "tensor_parallel",
    ]
    (verdict,) = pool.run(1, _check, "Remembers", layouts, steps=1)
    assert _states(verdict) == ["differs", "equal"], f"{verdict}"
    of_step = {one.name for one in verdict.layouts[0].findings if one.what == "gradient"}
    assert of_step == {"norm.weight", "norm.bias", "up.weight", "up.bias"}


def test_what_is_refused_comes_with_its_message_and_what_ends_otherwise_with_how(pool: Pool) -> None:
    layouts = [dict(pipeline_parallel_size=2, microbatches=2), dict(tensor_parallel_size=3)]
    (verdict,) = pool.run(1, _check, "gan", layouts, devices=2)
    assert _states(verdict) == ["refused"] * 2 and not verdict
    assert "optimizes by hand (automatic_optimization = False)" in verdict.layouts[0].message
    assert verdict.layouts[1].message.startswith("tensor_parallel_size=3, but the Trainer starts 2 processes")
    (messages,) = pool.run(1, _ends)
    assert messages[:2] == ["rank 1 can't", "Rank 1 died."]
    assert messages[2].startswith(
        "The module does not train on one device, so there is nothing to compare with. KeyErr"
    )
    assert "in hidden" in messages[2]


def _ends() -> list[str]:
    verdicts = [_check("OnOneRank", AXES[:1]), _check("Dies", AXES[:1])]
    return [*(verdict.layouts[0].message for verdict in verdicts), _check("Fails", AXES[:1])]


PEER = "[/gloo/transport/tcp/pair.cc:1] Connection closed by peer"


def _raised(error: type[Exception], cleaning_up: bool = False, wrapped: bool = False) -> processes._Failure:
    try:
        try:
            raise error(PEER if error is RuntimeError else "mine")
        except Exception as first:
            if cleaning_up:
                raise RuntimeError(PEER)  # noqa: B904
            if wrapped:
                raise ValueError("Receiving failed") from first
            raise
    except Exception as raised:
        return processes._failure(raised)


FAILURES: dict[str, tuple[list[processes._Failure | None], str]] = {
    "a death": ([_raised(RuntimeError), None], "Rank 1 died."),
    "a death, wrapped by a peer": ([_raised(RuntimeError, wrapped=True), None], "Rank 1 died."),
    "an exception": ([_raised(RuntimeError), _raised(KeyError)], "KeyError: 'mine'"),
    "an exception, then peers are gone": ([_raised(KeyError, cleaning_up=True), None], "KeyError: 'mine'"),
    "nothing else": ([_raised(RuntimeError, wrapped=True), _raised(RuntimeError)], "Receiving failed"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_rank_is_named_that_failed_by_itself_whoever_is_heard_first(name: str, tmp_path: Path) -> None:
    failures, message = FAILURES[name]
    ranks, ends = [], []
    for failure in failures:  # all is there when the first is read
        ours, theirs = Pipe()
        ranks.append(processes._Rank(0, ours, tmp_path / "output"))
        if failure is not None:
            theirs.send(failure)
            ends.append(theirs)
        else:
            theirs.close()
    with pytest.raises(processes.RankFailedError, match=f"^{re.escape(message)}$"):
        processes._collect(ranks, timeout=60)


def _hangs() -> None:
    time.sleep(100)


def _dies_unseen(folder: Path) -> None:
    """Rank 1 leaves a loader worker, which has its end of the connection, too; then rank 0 misses it."""
    if os.environ["RANK"] == "1":
        rank = os.getpid()
        if os.fork():
            os._exit(3)
        while os.getppid() == rank:
            time.sleep(0.01)
        (folder / "dead").touch()
        time.sleep(100)
    while not (folder / "dead").exists():
        time.sleep(0.01)
    raise RuntimeError(PEER)


def _how_ranks_end(folder: Path) -> list[str]:
    found = []
    for function, timeout in ((_hangs, 0.5), (partial(_dies_unseen, folder), 60.0)):
        try:
            with mock.patch.object(processes, "GRACE", 0.1):
                processes.run_ranks(2, function, str(folder), timeout)
        except processes.RankFailedError as error:
            found.append(str(error))
    return found


def test_a_rank_that_hangs_and_one_that_dies_unseen_are_named(pool: Pool, tmp_path: Path) -> None:
    ((hangs, dies),) = pool.run(1, _how_ranks_end, tmp_path)
    assert re.fullmatch(r"Rank [01] was not done after 0\.5 s\.", hangs) and dies == "Rank 1 died."


def test_a_cast_to_float32_does_not_round(pool: Pool) -> None:
    """As norms of Hugging Face's have it."""
    (verdict,) = pool.run(1, _check, "Casts", ["tensor_parallel"])
    assert verdict, f"{verdict}"


def test_what_rounds_to_float32_is_told_by_its_size(pool: Pool) -> None:
    (verdict,) = pool.run(1, _check, "Rounds", ["tensor_parallel"])
    assert _states(verdict) == ["differs"]
    assert verdict.footer() == ["Differences are of the size of float32's rounding: does the module cast to float32?"]


def test_the_other_lightnings_modules_are_checked_with_its_trainer(pool: Pool) -> None:
    (verdict,) = pool.run(1, _check, "OfTheOther", ["tensor_parallel", pl.PipelineParallelStrategy()])
    assert verdict, f"{verdict}"


SCRIPT = """
import sys
import torch
from lightning.pytorch import LightningModule
import lightning_par

print("the script runs")

class Mine(LightningModule):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    def training_step(self, batch):
        return self.down(self.up(batch).relu()).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

module = Mine()
before = module.up.weight.clone()
module.training_step(torch.randn(4, 8)).backward()
verdict = lightning_par.check(module, torch.randn(4, 8), "tensor_parallel")
assert torch.equal(before, module.up.weight)
print(verdict, bool(verdict))
"""


def _run(*arguments: str) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@slow()
def test_a_script_that_guards_nothing_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    code, output, errors = _run(str(tmp_path / "script.py"))
    assert code == 0, errors
    assert output.count("the script runs") == 1
    assert re.search(r"tensor_parallel +tensor 2 +equal\b.*True", output, re.DOTALL)


@slow()
def test_a_module_that_can_be_imported_is_checked_in_a_fresh_interpreter() -> None:
    verdict = lightning_par.check(ReadsRank, make_batch(), ["tensor_parallel"], steps=1)
    assert _states(verdict) == ["differs"] and verdict.steps == 1
    assert "ReadsRank" in sys.modules[__name__].__dict__ and not dist.is_initialized()


def _command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; in a worker, which saves the imports."""
    os.environ["COLUMNS"] = "200"
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = command.main(arguments)
    return code, out.getvalue(), err.getvalue()


def _arguments(*more: str, module: str = "Net", batch: str = "make_batch") -> list[str]:
    return ["check", f"{__file__}:{module}", "--batch", f"{__file__}:{batch}", *more]


@slow()
def test_the_command_line_says_the_same_and_ends_with_its_code(pool: Pool) -> None:
    layouts = ["--layout", "tensor_parallel", "--layout", '{"sequence_parallel_size": 2}']
    code, output, errors = _run("-m", "lightning_par", *_arguments(*layouts, "--init", '{"width": 12}', "--steps", "1"))
    assert code == 0 and output.count("equal") == 2 and "1 step in" in output, output + errors
    (found,) = pool.run(1, _command, *_arguments("--layout", "tensor_parallel", module="ReadsRank"))
    assert found[0] == 1 and "differs" in found[1] and "up.weight" in found[1], found
    (found,) = pool.run(1, _command, *_arguments("--layout", '{"tensor_parallel_size": 3}', "--devices", "2"))
    assert found[0] == 2 and "refused" in found[1] and found[2] == "", found


WRONG = {
    "the layout 'tensor' is unknown; write one of": _arguments("--layout", "tensor"),
    "the following arguments are required: --batch, --layout": ["check", "x.py:X"],
    "there is no file .*nowhere.py": ["check", "nowhere.py:X", "--batch", "b.py:b", "--layout", "tensor_parallel"],
    "test_check.py has no 'nothing'": _arguments("--layout", "tensor_parallel", batch="nothing"),
    "has no 'Remember'; it has 'Remembers'": _arguments("--layout", "tensor_parallel", batch="Remember"),
    "'nothing' names nothing: write FILE.py:NAME": ["check", "nothing", "--batch", "b:b", "--layout", "x"],
    "is no JSON": _arguments("--layout", "{1"),
    "unexpected keyword argument 'tensor'": _arguments("--layout", '{"tensor": 2}'),
    "unexpected keyword argument 'wide'": _arguments("--layout", "tensor_parallel", "--init", '{"wide": 2}'),
    "steps must be a positive int, got 0": _arguments("--layout", "tensor_parallel", "--steps", "0"),
    "must be a lightningmodule or make one, not a tuple": _arguments(
        "--layout", "hybrid_parallel", module="make_batch"
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_one_plain_line(message: str) -> None:
    code, output, errors = _command(*WRONG[message])
    assert (code, output) == (2, "") and errors.startswith("lightning_par check: ") and errors.count("\n") == 1
    assert re.search(message.lower(), errors.lower()), errors


def test_wrong_arguments_of_the_function() -> None:
    with pytest.raises(TypeError, match="module must be a LightningModule or make one, not a Linear"):
        lightning_par.check(nn.Linear(2, 2), make_batch(), AXES)
    with pytest.raises(TypeError, match="its class or a function, got 3"):
        lightning_par.check(3, make_batch(), AXES)
    with pytest.raises(ValueError, match="There is no batch"):
        lightning_par.check(Net, iter([]), AXES)
    with pytest.raises(ValueError, match="There is no layout to check"):
        lightning_par.check(Net, make_batch(), [])
    with pytest.raises(TypeError, match="A layout is a name such as 'tensor_parallel'.* not 2"):
        lightning_par.check(Net, make_batch(), 2)
    with pytest.raises(ValueError, match=r"belongs to lightning\.pytorch, but .*lightning_par\.TensorParallelStrategy"):
        lightning_par.check(Net, make_batch(), [pl.TensorParallelStrategy()])


def test_layouts_take_as_many_ranks_as_their_sizes_say() -> None:
    asked = [
        "hybrid_parallel",
        "tensor_parallel",
        dict(sequence_parallel_size=2, tensor_parallel_size=2),
        PipelineParallelStrategy(pipeline_parallel_size=3),
        lightning_par.TensorParallelStrategy(data_parallel_size=2),
        lightning_par.LayerPlacementStrategy({"up": 0, "down": 2}),
        lightning_par.LayerPlacementStrategy(),
    ]
    found = read_layouts(asked, None, LIGHTNING)
    assert [one.sizes for one in found] == [
        "data 2", "tensor 2", "sequence 2 x tensor 2", "pipeline 3", "data 2 x tensor 2", "pipeline 3", "pipeline 2",
    ]  # fmt: skip
    assert [one.copies for one in found] == [2, 1, 1, 1, 2, 1, 1]
    assert (
        found[2].name == "sequence_parallel_size=2, tensor_parallel_size=2"
        and found[3].name == "PipelineParallelStrategy"
    )


def test_a_long_list_is_cut_to_the_worst() -> None:
    findings = [Finding("gradient", f"w{i}", "far", i / 10) for i in range(9)] + [Finding("weight", "w2", "far", 0.95)]
    layout = LayoutVerdict("tensor_parallel", "tensor 2", "differs", findings=tuple(findings))
    assert layout.lines() == [
        "first: gradient w0: far", "w2: 9.5e-01 (weight)", "w8: 8.0e-01 (gradient)", "w7: 7.0e-01 (gradient)",
        "w6: 6.0e-01 (gradient)", "w5: 5.0e-01 (gradient)", "and 4 more parameters",
    ]  # fmt: skip
    text = str(Verdict((layout,), ("A note.",)))
    assert text.splitlines()[0] == "Against one device, 2 steps in float64, to 1e-09" and text.endswith("A note.")
