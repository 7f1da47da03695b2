"""What any layout saves, as a file or as a directory, any other loads bit by bit, and trains on from there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from lightning_par.checkpoint.outline import OWN
from lightning_par.checkpoint.reading import load_whole
from tests.checkpoint.test_checkpoints import LAYOUTS, RANKS, Counts, Model, _scaled, data, load, quiet, trainer_for
from tests.helpers.differences import differences
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

ALL = [layout for layout in LAYOUTS if layout != "pp2-whole"]
KINDS = ("file", "folder")


def _save_both(trainer: Trainer, folder: Path) -> None:
    """A file, and a directory where the strategy is ours."""
    strategy: Any = trainer.strategy
    ours = hasattr(strategy, "save_distributed_checkpoint")
    for how, name in ((False, "file"), (True, "folder"))[: 1 + ours]:
        if ours:
            strategy.save_distributed_checkpoint = how
        trainer.save_checkpoint(folder / name)


class SaveBothAtStart(Callback):
    """What was just loaded is saved again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _save_both(trainer, self.folder)


def _trainer(layout: str, folder: Path, mixed: bool, plain: bool, epochs: int, *callbacks: Callback) -> Trainer:
    callbacks = (Counts(), EarlyStopping("val_loss", patience=9), *callbacks)
    options: dict[str, Any] = dict(plugins=[_scaled()]) if mixed else {}
    return trainer_for(layout, folder, distributed=not plain, max_epochs=epochs, callbacks=[*callbacks], **options)


def _write(layout: str, folder: Path, mixed: bool = False) -> None:
    """Train for an epoch and save; one device also trains on."""
    with quiet():
        trainer = _trainer(layout, folder, mixed, False, 1)
        trainer.fit(Model().double(), data(), data())
        _save_both(trainer, folder)
        if layout == "one":
            trainer = _trainer(layout, folder, mixed, True, 2)
            trainer.fit(Model().double(), data(), data())
            trainer.save_checkpoint(folder / "end")


def _resume(layout: str, sources: Iterable[tuple[Path, Path]], mixed: bool = False, plain: bool = False) -> None:
    """Load each source, save it again before the first batch, train for an epoch more and save the end."""
    for source, folder in sources:
        with quiet():
            model = Model().double()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1.0)  # what was there before must not count
            trainer = _trainer(layout, folder, mixed, plain, 2, SaveBothAtStart(folder))
            trainer.fit(model, data(), data(), ckpt_path=source)
            trainer.save_checkpoint(folder / "end")


def _content(path: Path) -> dict[str, Any]:
    return load_whole(str(path)) if path.is_dir() else load(path)


def _check(before: Path, after: Path, reference: Path, end: Path | None) -> None:
    """Compare what was read from ``before`` and saved again at ``after`` with what one device makes of it."""
    one = _content(reference)
    for kind in KINDS:
        if not (after / kind).exists():
            continue
        again = _content(after / kind)
        own = again.pop(OWN, None)
        assert (own is not None) == (kind == "folder")
        assert not differences(one, again, 0.0), (before, kind)
        if before.is_dir() and own is not None:
            generators = [{"generators": x["generators"]} for x in (_content(before)[OWN], own)]
            assert not differences(*generators, 0.0), "what draws before the first batch of a resumed run draws anew"
    if end is not None:
        trained = _content(after / "end")
        trained.pop(OWN, None)
        assert not differences(load(end), trained, 1e-9), (before, "trained on")


def _chain(pool: Pool, layouts: list[str], folder: Path, kinds: tuple[str, str], mixed: bool) -> None:
    """From one layout to the next, by one kind of checkpoint and the other in turn, and back to plain Lightning."""
    pool.run(1, _write, "one", folder / "0", mixed)
    pool.run(1, _resume, "one", [(folder / "0" / "file", folder / "one")], mixed, True)
    before = folder / "0"
    for i, layout in enumerate([*layouts, "plain"], start=1):
        source = before / ("file" if layout == "plain" else kinds[i % 2])
        reader = "one" if layout == "plain" else layout
        after = folder / f"{i}-{layout}"
        pool.run(RANKS[reader], _resume, reader, [(source, after)], mixed, layout == "plain")
        _check(source, after, folder / "one" / "file", None if mixed else folder / "0" / "end")
        before = after


CHAINS = {
    "each axis": (KINDS, ["tp2", "sp2", "fsdp2", "placed3", "fsdp2-pp2"]),
    "all": (KINDS, ALL),
    "all back": (KINDS[::-1], [layout for layout in ALL[::-1] if RANKS[layout] < 4]),
}


@slow(but=["each axis"])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_goes_from_layout_to_layout_bit_by_bit(chain: str, pool: Pool, tmp_path: Path) -> None:
    kinds, layouts = CHAINS[chain]
    _chain(pool, layouts, tmp_path, kinds, mixed=False)


@slow()
def test_the_scaler_goes_with_it(pool: Pool, tmp_path: Path) -> None:
    _chain(pool, ["tp2", "pp2", "sp2", "placed"], tmp_path, ("folder", "folder"), mixed=True)


@pytest.fixture(scope="module")
def written(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each layout writes after an epoch, and what one device makes of each."""
    folder = tmp_path_factory.mktemp("written")
    for layout in ALL:
        pool.run(RANKS[layout], _write, layout, folder / layout)
        pool.run(1, _resume, "one", [(folder / layout / "file", folder / f"{layout}-one")], False, True)
    return folder


@slow()
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("reader", ["plain", *ALL])
def test_every_layout_loads_what_every_other_wrote(reader: str, written: Path, pool: Pool, tmp_path: Path) -> None:
    plain, layout = reader == "plain", "one" if reader == "plain" else reader
    for writer in ALL:
        kinds = KINDS[:1] if plain else KINDS  # plain Lightning knows no directories of ours
        sources = [(written / writer / kind, tmp_path / writer / kind) for kind in kinds]
        pool.run(RANKS[layout], _resume, layout, sources, False, plain)
        for source, after in sources:
            _check(source, after, written / f"{writer}-one" / "file", written / "one" / "end")
