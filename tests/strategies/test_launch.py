"""How processes start and end: each launcher trains, wrong sizes end at once, an exception leaves no process behind."""

from __future__ import annotations

import inspect
import os
import pickle
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_par import TensorParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, sys
import torch
from {pl}.demos.boring_classes import BoringModel
from {pl} import Trainer
from {ours} import TensorParallelStrategy

class Model(BoringModel):
    fails = False

    def training_step(self, batch, batch_idx):
        if self.fails and self.global_rank == int(sys.argv[-1]) and batch_idx == 2:
            raise ValueError(f"the failure of rank {{self.global_rank}}")
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        torch.distributed.barrier()
        print(f"rank {{self.global_rank}} of {{self.trainer.world_size}} done in {{os.getpid()}}", flush=True)

if __name__ == "__main__":
    start_method, devices, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = Model()
    initial = model.layer.weight.detach().clone()
    for model.fails in (False, True) if "fail" in sys.argv else (False,):
        trainer = Trainer(
            accelerator="cpu", devices=devices, max_epochs=1, limit_train_batches=4, limit_val_batches=0,
            strategy=TensorParallelStrategy(tensor_parallel_size=size, start_method=start_method),
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(model)
        if trainer.global_rank == 0:
            trained = not torch.equal(initial, model.layer.weight)
            print("trained" if trained else "the weights did not come back", flush=True)
"""


PATIENCE = 250.0  # seconds for what would else take the process group's 30 minutes
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone")
Runs = Callable[[str], tuple[int, str]]
RUNS: dict[str, tuple[tuple[str, ...], str]] = {
    "spawn": ((), "spawn 2 1"),
    # Told to fork, too, it must not: torchrun's processes would each start two of their own.
    "torchrun": (TORCHRUN, "fork 2 1"),
    "auto": ((), "auto 2 1 fail 0"),
    "fork": ((), "fork 2 1 fail 1"),
}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], list[dict[str, Any]]], pool: Pool
) -> Iterator[Runs]:
    """Exit code and output of a run. Two go on at once: most of their time is one core's."""
    tests = (test_every_start_method_trains_and_hands_the_weights_back,
             test_an_exception_on_one_rank_ends_the_job_with_its_traceback)  # fmt: skip
    wanted = {row["start_method"] for test in tests for row in asked(test.__name__)}
    folder = tmp_path_factory.mktemp("scripts")
    plain, other = folder / "train.py", folder / "train_other.py"
    plain.write_text(SCRIPT.format(pl="lightning.pytorch", ours="lightning_par"))
    other.write_text(SCRIPT.format(pl="pytorch_lightning", ours="lightning_par.pl"))
    with ThreadPoolExecutor(2) as executor:
        futures = {}
        for name, (launcher, arguments) in ((name, run) for name, run in RUNS.items() if name in wanted):
            path = other if name in ("spawn", "fork") else plain  # either Lightning has its own class
            if name == "fork":  # what forks has long been there, as a notebook's kernel: it needn't import all anew
                futures[name] = executor.submit(pool.run_apart, _run_forked, [str(path), *arguments.split()])
            else:
                command = [sys.executable, *launcher, str(path), *arguments.split()]
                futures[name] = executor.submit(_run, command)
        yield lambda name: futures[name].result()
        for future in futures.values():
            future.cancel()


def _environment() -> dict[str, str]:
    foreign = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "PL_GLOBAL_SEED")
    foreign = (*foreign, "TORCHELASTIC_USE_AGENT_STORE")
    env = {k: v for k, v in os.environ.items() if k not in foreign}
    return env | {"PYTHONPATH": f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}


def _run(command: list[str]) -> tuple[int, str]:
    """Exit code and output; what is left of the session's processes is an error."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(),
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
        _wait_until_gone(process.pid)
    finally:
        if _alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def _run_forked(arguments: list[str]) -> tuple[int, str]:
    """As `_run`, of a script that is run by a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _become_script(arguments, write)
    os.close(write)
    try:
        with open(read) as output:
            said = output.read()  # until none of its processes is there
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _wait_until_gone(child)
    finally:
        if _alive(child):
            os.killpg(child, signal.SIGKILL)
    return code, said


def _become_script(arguments: list[str], output: int) -> None:
    os.setsid()
    signal.alarm(int(PATIENCE))
    os.dup2(output, 1), os.dup2(output, 2), os.close(output)
    environment = _environment()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    code = 1
    try:
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while _alive(group):
        assert time.monotonic() < deadline, "a process is left behind"
        time.sleep(0.1)


@long()
@slow("spawn", "torchrun", "fork")
@pytest.mark.parametrize("start_method", RUNS)
def test_every_start_method_trains_and_hands_the_weights_back(runs: Runs, start_method: str) -> None:
    code, output = runs(start_method)
    assert (code == 0) == ("fail" not in RUNS[start_method][1]), output
    assert output.count("done in") == 2, "others were started"
    assert "rank 0 of 2 done" in output and "rank 1 of 2 done" in output
    assert "\ntrained" in output


@slow("fork-1")
@pytest.mark.parametrize(("start_method", "rank"), [("auto", 0), ("fork", 1)])
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(runs: Runs, start_method: str, rank: int) -> None:
    code, output = runs(start_method)
    assert code != 0
    assert f"ValueError: the failure of rank {rank}" in output


def _trainer(devices: int = 4, **kwargs: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=devices, strategy=TensorParallelStrategy(**kwargs), logger=False)


def test_wrong_sizes_end_when_the_trainer_is_made() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3, but the Trainer starts 4 processes"):
        _trainer(tensor_parallel_size=3)
    with pytest.raises(ValueError, match="`tensor_parallel_size` must be a positive int or 'auto', got 0"):
        _trainer(tensor_parallel_size=0)
    with pytest.raises(ValueError, match=r"start_method='thread' is unknown; write one of 'auto', 'popen'"):
        _trainer(start_method="thread")


def test_sizes_left_out_take_what_the_others_leave() -> None:
    assert str(_trainer().strategy.layout) == "tensor 4"  # type: ignore[attr-defined]
    assert str(_trainer(tensor_parallel_size=2).strategy.layout) == "data 2 x tensor 2"  # type: ignore[attr-defined]
    assert str(_trainer(data_parallel_size=4).strategy.layout) == "data 4"  # type: ignore[attr-defined]


def test_lightning_is_told_of_replicas_only_where_there_are_several() -> None:
    assert _trainer(tensor_parallel_size=2).strategy.is_distributed  # type: ignore[attr-defined]
    assert not _trainer().strategy.is_distributed  # type: ignore[attr-defined]


def test_a_strategy_of_the_other_namespace_says_which_to_use() -> None:
    import pytorch_lightning

    from lightning_par import pl

    with pytest.raises(ValueError, match=r"with pytorch_lightning use lightning_par\.pl\.TensorParallelStrategy"):
        pytorch_lightning.Trainer(strategy=TensorParallelStrategy(), accelerator="cpu")
    with pytest.raises(ValueError, match=r"with lightning\.pytorch use lightning_par\.TensorParallelStrategy"):
        Trainer(strategy=pl.TensorParallelStrategy(), accelerator="cpu")


def test_the_constructor_shows_just_its_arguments_and_pickles() -> None:
    parameters = inspect.signature(TensorParallelStrategy).parameters
    assert list(parameters)[:2] == ["tensor_parallel_size", "data_parallel_size"]
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    assert all(f"{name}:" in (TensorParallelStrategy.__doc__ or "") for name in parameters)
    strategy = pickle.loads(pickle.dumps(TensorParallelStrategy(tensor_parallel_size=2)))
    assert strategy.tensor_parallel_size == 2
