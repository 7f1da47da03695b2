"""A byte-level GPT learns Python from the standard library's own sources, then writes some.

    python examples/gpt.py fit
    python examples/gpt.py fit --trainer.strategy=tensor_parallel --trainer.devices=2
    python examples/gpt.py fit --trainer.strategy=pipeline_parallel --trainer.devices=2

The strategy is all that changes between one device and many: nothing below knows about parallelism. Other things to
try: ``--model.mlp=swiglu --model.norm=rmsnorm``, ``--model.tied=false``, ``--trainer.precision=bf16-mixed``, and
``--help`` for the rest.
"""

from __future__ import annotations

import math
import sysconfig
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # one token a byte


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class GELU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8 * width // 3  # three matrices of this width weigh what the two of GELU do
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


MLPS = {"gelu": GELU, "swiglu": SwiGLU}
NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp: str, norm: str, dropout: float) -> None:
        super().__init__()
        self.norm_1 = NORMS[norm](width)
        self.attention = Attention(width, heads, dropout)
        self.norm_2 = NORMS[norm](width)
        self.mlp = MLPS[mlp](width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(LightningModule):
    """A decoder-only transformer over bytes.

    Args:
        width: features of the residual stream, a multiple of ``heads``.
        heads: attention heads.
        depth: transformer blocks.
        context: bytes that it sees at once.
        mlp: the feed-forward half of a block.
        norm: the normalisation before each half.
        tied: whether the head is the embedding's own weight.
        dropout: share of activations dropped in training.
        learning_rate: AdamW's, after a warm-up and before a cosine decay to a tenth.
        weight_decay: AdamW's, on matrices only.
    """

    def __init__(
        self,
        width: int = 192,
        heads: int = 6,
        depth: int = 4,
        context: int = 128,
        mlp: Literal["gelu", "swiglu"] = "gelu",
        norm: Literal["layernorm", "rmsnorm"] = "layernorm",
        tied: bool = True,
        dropout: float = 0.0,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, mlp, norm, dropout) for _ in range(depth))
        self.norm = NORMS[norm](width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._init_weights)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth))  # the residual stream sums 2 * depth of them
        if tied:
            self.head.weight = self.bytes.weight

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the next byte, (B, T, 256), from the bytes so far, (B, T)."""
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        scores = self(batch[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_bpb", loss / math.log(2), prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_bpb", self.loss(batch) / math.log(2), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": self.hparams.weight_decay},
            {"params": [p for p in self.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, betas=(0.9, 0.95))
        total = self.trainer.estimated_stepping_batches
        warmup = min(100, total // 10)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            done = min(1.0, (step - warmup) / max(1, total - warmup))
            return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, length: int, temperature: float = 0.8, seed: int = 0) -> str:
        """``prompt`` and ``length`` bytes after it, drawn by their probabilities sharpened by ``temperature``."""
        self.eval()
        draw = torch.Generator().manual_seed(seed)
        text = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(length):
            scores = self(text[:, -self.hparams.context :])[:, -1]
            chances = (scores.float().cpu() / temperature).softmax(dim=-1)
            following = torch.multinomial(chances, 1, generator=draw)
            text = torch.cat([text, following.to(text.device)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


class Windows(Dataset[Tensor]):
    """Windows of ``length`` bytes side by side, each with the byte that follows it."""

    def __init__(self, text: bytes, length: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.text[start : start + self.length + 1].long()


class StandardLibrary(LightningDataModule):
    """The sources of Python's standard library, every tenth file held out. Nothing is downloaded.

    Args:
        context: bytes in a window.
        batch_size: windows in a batch.
        max_bytes: how much of the sources to use, whole files from the start of the alphabet.
        num_workers: processes that load.
    """

    def __init__(
        self, context: int = 128, batch_size: int = 16, max_bytes: int = 8_000_000, num_workers: int = 0
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        texts = self.texts()
        self.train = Windows(b"".join(t for i, t in enumerate(texts) if i % 10 != 9), self.hparams.context)
        self.val = Windows(b"".join(texts[9::10]), self.hparams.context)

    def texts(self) -> list[bytes]:
        """The files' contents."""
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = sorted(
            path
            for path in root.rglob("*.py")
            if not {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(root).parts)
        )
        texts: list[bytes] = []
        room = self.hparams.max_bytes
        for path in paths:
            text = path.read_bytes()
            if len(text) > room:
                break
            texts.append(text)
            room -= len(text)
        return texts

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.val, shuffle=False)

    def _loader(self, windows: Windows, shuffle: bool) -> DataLoader[Tensor]:
        return DataLoader(
            windows,
            batch_size=self.hparams.batch_size,
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=self.hparams.num_workers,
        )


class PrintProgress(Callback):
    """One line a validation, which stays on the screen."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            bpb = trainer.callback_metrics["val_bpb"].item()
            trainer.print(f"step {trainer.global_step:5d}: {bpb:.3f} bits per byte of held-out text")


class CLI(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_lightning_class_args(PrintProgress, "print_progress")
        parser.link_arguments("data.context", "model.context")

    def after_fit(self) -> None:
        # Every process calls the model, one prints: right under any strategy.
        sample = self.model.generate(prompt="def ", length=300)
        if self.trainer.is_global_zero:
            bpb = self.trainer.callback_metrics.get("val_bpb", math.nan)  # not there where no validation ran
            print(f"\nWhat it writes after {self.trainer.global_step} steps:\n\n{sample}\n")
            print(f"Held-out text: {bpb:.2f} bits per byte, from 8 where all bytes are equally likely.")


def main() -> None:
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    CLI(
        GPT,
        StandardLibrary,
        seed_everything_default=0,
        trainer_defaults={
            "max_steps": 300,
            "val_check_interval": 50,
            "limit_val_batches": 10,
            "log_every_n_steps": 10,
            "gradient_clip_val": 1.0,
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "."}},
        },
    )


if __name__ == "__main__":
    main()
