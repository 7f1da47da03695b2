"""To load takes each rank its own part of the weights, and no more."""

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


@slow()
@pytest.mark.timeout(600)
@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the system does not say what was read")
@pytest.mark.parametrize("layout", ["tp2", "pp2", "fsdp2", "tp2-pp2"])
def test_loading_takes_memory_for_the_own_part(layout: str, fresh: Pool, tmp_path: Path) -> None:
    import transformers

    for size, sizes in SIZES.items():  # the large one has 1 GB
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, max_position_embeddings=64)
        with torch.no_grad():
            transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / size, max_shard_size="300MB")
    found = fresh.run(4 if layout == "tp2-pp2" else 2, _ratios, tmp_path, layout, timeout=300)
    print(layout, found)
    assert all(0 < memory <= 1.1 and 0 < read <= 1.2 for memory, read in found), found
