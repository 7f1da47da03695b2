"""A run that a signal tells to end stops on all ranks at one place, and saves there, once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import Precision
from torch.utils.data import DataLoader

from tests.endurance.signal_job import STRATEGIES, Loader, Net
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow


class Sends(Callback):
    """Sends this process a signal in a hook.

    Args:
        hook: its name.
        rank: which rank's process.
        times: how often the hook has run before.
        number: of the signal.
        pause: seconds until all go on; without it, some may be past the next place to stop before they know.
    """

    def __init__(
        self, hook: str, rank: int = 1, times: int = 0, number: int = signal.SIGTERM, pause: float = 0.0
    ) -> None:
        self.rank, self.left, self.number, self.pause = rank, times, number, pause
        self.told: list[str] = []
        setattr(self, hook, self._send)

    def _send(self, *_: Any, **__: Any) -> None:
        if self.left == 0:
            if os.environ["LOCAL_RANK"] == str(self.rank):
                os.kill(os.getpid(), self.number)
            time.sleep(self.pause)
        self.left -= 1

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.told.append(f"{type(exception).__name__} {trainer.received_sigterm}")


def _threads() -> int:
    return sum(thread.name != "tqdm_monitor" for thread in threading.enumerate())


def _run(
    folder: Path, kind: str, callbacks: list[Any], entry: str = "fit", in_trial: Sends | None = None, **options: Any
) -> dict[str, Any]:
    """Run an entry point; what it ended by, and what it left."""
    torch.set_default_dtype(torch.float64)
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it for what it runs aside
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    threads = _threads()
    tokens = torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(1))
    defaults: dict[str, Any] = dict(max_epochs=2, val_check_interval=4, num_sanity_val_steps=0)
    trainer = L.Trainer(
        strategy=STRATEGIES[kind][1](),
        accelerator="cpu",
        devices=STRATEGIES[kind][0],
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )

    class Model(Net):
        lr = 0.01  # for who looks for another one
        test_step, predict_step = Net.validation_step, Net.forward

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            if in_trial is not None:  # which runs without the user's callbacks
                in_trial._send()

    code: Any = "none"
    loaders = [Loader(tokens, batch_size=4), DataLoader(tokens[:16], batch_size=4)]
    try:
        getattr(trainer, entry)(Model(folder, 0.0), *(loaders if entry == "fit" else loaders[1:]))
    except (SystemExit, KeyboardInterrupt) as ended:
        code = ended.code if isinstance(ended, SystemExit) else "interrupted"
    torch.distributed.barrier()
    found = sorted(path.name for path in folder.rglob("*.ckpt"))
    batches = [torch.load(path, weights_only=True)["loops"] for path in folder.rglob("*.ckpt")]
    return dict(
        code=code,
        told=[told for callback in callbacks if isinstance(callback, Sends) for told in callback.told],
        saved=found,
        batches=[loops["fit_loop"]["epoch_loop.batch_progress"]["total"]["completed"] for loops in batches],
        validated=[loops["fit_loop"]["epoch_loop.val_loop.batch_progress"]["current"] for loops in batches],
        restored=[signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers,
        threads=_threads() - threads,
    )


def _fit(folder: Path, kind: str, hook: str, times: int, *callbacks: Any, **options: Any) -> dict[str, Any]:
    number, pause = options.pop("number", signal.SIGTERM), options.pop("pause", 0.0)
    saving = ModelCheckpoint(folder, save_top_k=0)
    return _run(folder, kind, [Sends(hook, times=times, number=number, pause=pause), saving, *callbacks], **options)


HEARD = dict(pause=0.5)
WINDOW = dict(accumulate_grad_batches=4)


def _common(folder: Path) -> dict[str, dict[str, Any]]:
    saves = ModelCheckpoint(folder / "own", filename="own", save_on_exception=True, every_n_epochs=9)
    return {
        "training": _fit(folder / "training", "tensor", "on_train_batch_start", 2, **HEARD),
        "ctrl-c": _fit(folder / "ctrl-c", "tensor", "on_train_batch_start", 2, number=signal.SIGINT, **HEARD),
        "validation": _fit(folder / "validation", "tensor", "on_validation_batch_start", 2, **HEARD),
        "planning": _fit(folder / "planning", "tensor", "setup", 0),
        "window": _fit(folder / "window", "tensor", "on_train_batch_start", 1, **WINDOW, **HEARD),
        "within": _fit(
            folder / "within", "tensor", "on_validation_batch_start", 0, **WINDOW, **HEARD, val_check_interval=2
        ),
        "own": _run(folder / "own", "tensor", [Sends("on_train_batch_start", times=2, **HEARD), saves]),
        "test": _run(folder / "test", "tensor", [Sends("on_test_batch_start", times=1)], "test"),
    }


def _rare(folder: Path) -> dict[str, dict[str, Any]]:
    saves, finder = OnExceptionCheckpoint(folder / "callback"), LearningRateFinder(num_training_steps=8)
    return {
        "sanity": _fit(folder / "sanity", "tensor", "on_validation_batch_start", 0, num_sanity_val_steps=4),
        "first": _fit(folder / "first", "pipeline", "on_train_start", 0, **HEARD),
        "finder": _run(folder / "finder", "tensor", [finder], in_trial=Sends("on_exception", times=3)),
        "last": _fit(folder / "last", "pipeline", "on_train_batch_start", 15, **HEARD),
        "end": _fit(folder / "end", "tensor", "on_train_end", 0, **HEARD),
        "after": _fit(folder / "after", "tensor", "on_validation_end", 3, max_epochs=1, val_check_interval=2, **HEARD),
        "callback": _fit(folder / "callback", "sequence", "on_train_batch_start", 2, saves),
        "too late": _run(folder / "late", "tensor", [Sends("on_validation_end", pause=1.0)], "validate"),
        "predict": _run(folder / "predict", "placement", [Sends("on_predict_batch_start", times=1)], "predict"),
        "again": _fit(folder / "again", "fsdp", "on_fit_end", 99),
    }


def _differ(ranks: list[dict[str, dict[str, Any]]]) -> list[str]:
    """Cases in which the ranks ended apart, or left something behind."""
    first, second = ranks
    left = [name for name, case in first.items() if not case["restored"] or case["threads"] > 0]
    return left + [name for name in first if first[name] != second[name]]


def _shown(case: dict[str, Any]) -> list[Any]:
    return [case["code"], *case["told"], *case["saved"], *case["batches"]]


SIGTERM = [143, "SIGTERMException True"]


@long()
def test_where_a_run_stops_and_what_it_saves(pool: Pool, tmp_path: Path) -> None:
    ranks = pool.run(2, _common, tmp_path)
    assert not _differ(ranks)
    assert {name: _shown(case) for name, case in ranks[0].items()} == {
        "training": [*SIGTERM, "last-preempted-epoch=0-step=3.ckpt", 3],
        "ctrl-c": [1, "KeyboardInterrupt False", "last-preempted-epoch=0-step=3.ckpt", 3],
        "validation": [*SIGTERM, "last-preempted-epoch=0-step=4.ckpt", 4],
        "planning": SIGTERM,
        "window": [*SIGTERM, "last-preempted-epoch=0-step=1.ckpt", 4],
        "within": [*SIGTERM, "last-preempted-epoch=0-step=1.ckpt", 4],
        "own": [*SIGTERM, "own.ckpt", 3],
        "test": SIGTERM,
    }
    assert ranks[0]["validation"]["validated"] == [dict(ready=1, started=1, processed=0, completed=0)]


@slow()
def test_where_a_run_stops_at_rarer_moments(pool: Pool, tmp_path: Path) -> None:
    ranks = pool.run(2, _rare, tmp_path)
    assert not _differ(ranks)
    assert {name: _shown(case) for name, case in ranks[0].items()} == {
        "sanity": SIGTERM,
        "first": SIGTERM,
        "finder": [143],
        "last": [*SIGTERM, "last-preempted-epoch=1-step=16.ckpt", 16],
        "end": [*SIGTERM, "last-preempted-epoch=2-step=16.ckpt", 16],
        "after": [*SIGTERM, "last-preempted-epoch=1-step=8.ckpt", 8],
        "callback": [*SIGTERM, "on_exception.ckpt", 3],
        "too late": SIGTERM,
        "predict": SIGTERM,
        "again": ["none"],
    }


def _shuffled(folder: Path, path: Path | None, *callbacks: Any) -> list[torch.Tensor]:
    """Weights after training in an order that is drawn, or as far as it comes."""
    torch.set_default_dtype(torch.float64)
    tokens = torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        strategy=STRATEGIES["tensor"][1](), accelerator="cpu", devices=2, max_epochs=2, val_check_interval=4,
        num_sanity_val_steps=0, callbacks=[ModelCheckpoint(folder, save_top_k=0), *callbacks], **options,
    )  # fmt: skip
    net = Net(folder, 0.0)
    with contextlib.suppress(SystemExit):
        trainer.fit(net, DataLoader(tokens, 4, shuffle=True), DataLoader(tokens[:16], 4), ckpt_path=path)
    torch.distributed.barrier()
    return [x.detach().clone() for x in net.parameters()]


def _resumes(folder: Path, hook: str, times: int) -> float:
    folder.mkdir(exist_ok=True)
    whole = _shuffled(folder, None)
    _shuffled(folder, None, Sends(hook, times=times, **HEARD))
    (path,) = folder.glob("last-preempted*")
    resumed = _shuffled(folder, path, Draws())
    return max(float((a - b).abs().max()) for a, b in zip(whole, resumed, strict=True))


class Draws(Callback):
    """In a run that is resumed."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1 and trainer.fit_loop.restarting:
            torch.rand(3)


@long()
def test_data_that_is_drawn_is_gone_on_with_from_within_a_validation(pool: Pool, tmp_path: Path) -> None:
    assert max(pool.run(2, _resumes, tmp_path / "run", "on_validation_batch_start", 2)) < 1e-9


@slow()
def test_data_that_is_drawn_is_gone_on_with_before_an_epochs_first_batch(pool: Pool, tmp_path: Path) -> None:
    assert max(pool.run(2, _resumes, tmp_path / "run", "on_train_epoch_start", 1)) < 1e-9


class Tells(Precision):
    """Sends signals while the strategy tears down."""

    def __init__(self, *sends: Sends) -> None:
        self.sends = sends

    def teardown(self) -> None:
        for send in self.sends:
            send._send()


def _ends(folder: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint that is there of a signal in the last hook, and that of one as the run is torn down."""
    _fit(folder / "hook", kind, "on_train_end", 0, **HEARD)
    tells = Tells(Sends("_", **HEARD))
    case = _fit(folder / "torn", kind, "on_exception", 99, plugins=[tells])
    assert case["restored"] and not case["threads"] and case["code"] == 143, case
    hook, torn = (torch.load(*(folder / name).rglob("*.ckpt"), weights_only=True) for name in ("hook", "torn"))
    return hook, torn


@long()
@slow(but=["fsdp"])
@pytest.mark.parametrize("kind", ["fsdp", "pipeline", "placement"])
def test_a_signal_while_a_fit_is_torn_down_saves_what_it_has_trained(kind: str, pool: Pool, tmp_path: Path) -> None:
    hook, torn = pool.run(2, _ends, tmp_path, kind)[0]
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"):
        assert _same(hook[name], torn[name]), name


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(_same, a, b)) if isinstance(a, list) else bool(a == b)


def _with_a_users_handler(folder: Path) -> list[int]:
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    case = _run(folder, "tensor", [Sends("on_train_batch_start", rank=0, times=1)])
    signal.signal(signal.SIGTERM, before)
    return [*called, case["code"]]


def test_a_users_handler_is_called_besides(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _with_a_users_handler, tmp_path) == [[signal.SIGTERM, 143], [143]]
