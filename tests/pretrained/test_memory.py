"""To load takes each rank its own part of the weights, and no more; and so it is until the end of the run."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.private.storage import trim_memory
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.tensor import leaf
from tests.helpers.pool import Pool
from tests.helpers.process_memory import anonymous, watched
from tests.helpers.slow import slow
from tests.pretrained.test_load import LAYOUTS, Pretrained, fit

SIZES: dict[str, dict[str, int]] = {
    "small": dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4, vocab_size=256),
    "large": dict(
        hidden_size=2048, intermediate_size=5632, num_attention_heads=16, num_key_value_heads=8, vocab_size=16000
    ),
}


class Measuring(Callback):
    """The most anonymous memory from before the model to the start of training, and what was read."""

    ratios: tuple[float, float] = 0.0, 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        gc.collect()
        trim_memory()
        self.start, self.read, self.watch = anonymous(), _read(), watched()
        self.peaks = self.watch.__enter__()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch.__exit__(None, None, None)
        own = sum(leaf(x).nbytes for x in pl_module.parameters() if not is_elsewhere(x))
        largest = max(x.numel() * x.element_size() for x in pl_module.parameters())
        self.ratios = (self.peaks["self"] - self.start) / (own + largest), (_read() - self.read) / own
        raise KeyboardInterrupt  # all is seen, and after a run every rank holds the whole model


class Throughout(Callback):
    """The most anonymous memory of a run from before the model until every rank holds all of it again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.phase, self.peaks = folder, "", dict[str, int]()
        self.initial: dict[str, torch.Tensor] = {}
        self.losses: list[float] = []

    def enter(self, phase: str) -> None:
        if self.phase:
            self.watch.__exit__(None, None, None)
            self.peaks[self.phase] = self.now["self"] - self.start
        self.phase = phase
        if phase:
            self.watch = watched()
            self.now = self.watch.__enter__()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        gc.collect()
        trim_memory()
        self.start = anonymous()
        self.enter("load")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.enter("steps")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        weights = [leaf(x) for x in pl_module.parameters() if not is_elsewhere(x)]
        state = [leaf(x) for x in tensors_in([*trainer.optimizers[0].state.values()]) if not is_elsewhere(x)]
        self.own = sum(x.nbytes for x in weights) * 2 + sum(x.nbytes for x in state)  # gradients are like weights
        self.largest = max(x.numel() * x.element_size() for x in pl_module.parameters())
        blocks = pl_module.get_submodule("model.model.layers").children()
        self.block = max(sum(x.numel() * x.element_size() for x in block.parameters()) for block in blocks)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.enter("export")
        if trainer.is_global_zero:
            pl_module.model.save_pretrained(self.folder / "exported", max_shard_size="100MB")
        trainer.strategy.barrier()
        self.enter("end")


def _run_ratios(folder: Path, layout: str) -> dict[str, float]:
    for size in SIZES:
        throughout = Throughout(folder / size)
        fit(Pretrained(partial(_load, folder / size), at_once=False), "hf_llama", LAYOUTS[layout], seeing=throughout)
        throughout.enter("")
    taken = throughout.own + throughout.largest
    if layout == "fsdp2":  # three blocks are whole at once in backward, and the parts of one that travels
        taken += 3.5 * throughout.block
    return {phase: peak / taken for phase, peak in throughout.peaks.items()}


def _read() -> int:
    """Bytes that this process asked files for."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _load(folder: Path) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(folder)


def _ratios(folder: Path, layout: str) -> tuple[float, float]:
    for size in SIZES:  # the small one imports what is needed
        measuring = Measuring()

        module = Pretrained(partial(_load, folder / size), at_once=False)
        with pytest.raises(SystemExit):
            fit(module, "hf_llama", LAYOUTS[layout], seeing=measuring)
    return measuring.ratios


def _save_models(folder: Path) -> None:
    import transformers

    for size, sizes in SIZES.items():  # the large one has 1 GB
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, max_position_embeddings=64)
        with torch.no_grad():
            transformers.LlamaForCausalLM(config).save_pretrained(folder / size, max_shard_size="300MB")


@slow()
@pytest.mark.timeout(600)
@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the system does not say what was read")
@pytest.mark.parametrize("layout", ["tp2", "pp2", "fsdp2", "tp2-pp2"])
def test_loading_takes_memory_for_the_own_part(layout: str, fresh: Pool, tmp_path: Path) -> None:
    _save_models(tmp_path)
    found = fresh.run(4 if layout == "tp2-pp2" else 2, _ratios, tmp_path, layout, timeout=300)
    print(layout, found)
    assert all(0 < memory <= 1.1 and 0 < read <= 1.2 for memory, read in found), found


@slow()
@pytest.mark.timeout(900)
@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the system does not say what is anonymous")
@pytest.mark.parametrize("layout", ["tp2", "pp2", "fsdp2", "tp2-pp2"])
def test_a_run_takes_memory_for_the_own_part_until_its_end(layout: str, fresh: Pool, tmp_path: Path) -> None:
    _save_models(tmp_path)
    found = fresh.run(4 if layout == "tp2-pp2" else 2, _run_ratios, tmp_path, layout, timeout=800)
    print(layout, found)
    assert all(0 < ratio <= 1.15 for ratios in found for ratio in ratios.values()), found
