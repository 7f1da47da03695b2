"""A pretrained model is loaded, trained for three steps and exported under every layout: as on one device."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_par.checkpoint.export import export
from lightning_par.sharded.patches.float_casts import all_in_float64
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.pretrained.test_load import CASES, LAYOUTS, OPTIONS, Pretrained, fit, save

SIZE = "20KB"  # of a file, of which there are several


class Saving(Callback):
    """Saves the model as user code does on one rank, and a checkpoint; keeps the losses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.initial: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.casts = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.casts.enter_context(all_in_float64())  # not while it loads: there values are computed in float32

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.casts.close()
        trainer.save_checkpoint(self.folder / "last.ckpt")
        if trainer.is_global_zero:
            pl_module.model.save_pretrained(self.folder / "hook", max_shard_size=SIZE)


def _loaded(folder: Path, case: str) -> Any:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    options: dict[str, Any] = dict(dtype=torch.float64, **OPTIONS.get(case, {}))
    return getattr(transformers, name).from_pretrained(folder, **options)


def _train(case: str, pretrained: Path, layout: dict[str, Any] | None, folder: Path) -> list[float]:
    torch.manual_seed(11)

    def load() -> nn.Module:
        model: nn.Module = _loaded(pretrained, case)
        return model

    module = Pretrained(load, at_once=False)
    return fit(module, case, layout, seeing=Saving(folder), precision="64-true")[2]  # type: ignore[no-any-return]


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if "safetensors" in path.name}


@slow(but=["tp2-hf_gpt2"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_train_and_export(layout: str, case: str, pool: Pool, tmp_path: Path) -> None:
    pretrained, alone, split = (tmp_path / name for name in ("pretrained", "alone", "split"))
    model = save(case, pretrained, "many", torch.float64)
    config = json.loads((pretrained / "config.json").read_text())
    (pretrained / "config.json").write_text(json.dumps({**config, "architectures": [model.__name__]}))
    (losses,) = pool.run(1, _train, case, pretrained, None, alone)
    for theirs in pool.run(4 if layout == "tp2-pp2" else 2, _train, case, pretrained, LAYOUTS[layout], split):
        if layout != "fsdp2":  # else each replica has losses of its own
            assert theirs == pytest.approx(losses, rel=1e-9)

    state = torch.load(split / "last.ckpt", weights_only=True)["state_dict"]
    mine = _loaded(pretrained, case)
    mine.load_state_dict({name.removeprefix("model."): x for name, x in state.items()})
    mine.save_pretrained(split / "one", max_shard_size=SIZE)
    export(split / "last.ckpt", split / "exported", config=pretrained, max_shard_size=SIZE)
    expected = _contents(split / "one")
    assert len(expected) > 2 and _contents(split / "hook") == expected == _contents(split / "exported")

    if layout != "fsdp2":
        right = torch.load(alone / "last.ckpt", weights_only=True)["state_dict"]
        largest = max(float(x.abs().max()) for x in right.values())
        assert state.keys() == right.keys()
        assert max(float((state[name] - x).abs().max()) for name, x in right.items()) <= 1e-9 * largest
