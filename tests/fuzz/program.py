"""A program as data, and its source text: what is drawn, shrunk and run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.fuzz.losses import PLAIN_LOSSES
from tests.fuzz.optimizers import PLAIN_OPTIMIZER
from tests.fuzz.piece import Piece

IMPORTS = """
import collections, copy, dataclasses, functools, itertools, math, random
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
"""

SIGNATURES = {
    "on_fit_start": "",
    "on_train_start": "",
    "on_train_epoch_start": "",
    "on_train_epoch_end": "",
    "on_train_batch_start": "batch, batch_idx",
    "on_train_batch_end": "outputs, batch, batch_idx",
    "on_validation_epoch_start": "",
    "on_validation_epoch_end": "",
    "on_before_backward": "loss",
    "on_after_backward": "",
    "on_before_optimizer_step": "optimizer",
    "on_before_zero_grad": "optimizer",
}


@dataclass(frozen=True)
class Placed:
    """A piece, with a number of its own."""

    piece: Piece
    number: int


@dataclass(frozen=True)
class Group:
    """Pieces that follow one another, in the LightningModule itself or in a block of their own."""

    kind: str  # "net" or "block"
    placed: tuple[Placed, ...]
    number: int
    times: int = 1


@dataclass(frozen=True)
class Program:
    """All that a seed stands for, or a shrunk one."""

    seed: int
    sizes: tuple[tuple[str, int], ...]
    stem: Placed
    groups: tuple[Group, ...]
    head: Placed
    loss: Placed
    extras: tuple[Placed, ...]
    optimizer: Placed
    options: tuple[tuple[str, str], ...]
    form: str = "tuple"  # of a batch
    inline: bool = False  # whether the step holds the forward pass
    samples: int = 12
    epochs: int = 1
    validates: bool = False
    returns: str = "loss"
    steps: str = "training_step(self, batch, batch_idx)"

    def all_placed(self) -> Iterator[Placed]:
        yield self.stem
        for group in self.groups:
            yield from group.placed
        yield from (self.head, self.loss, *self.extras, self.optimizer)

    @property
    def draws(self) -> bool:
        return any(one.piece.draws for one in self.all_placed())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.piece.name for one in self.all_placed())

    def size(self) -> int:
        """How much there is to read."""
        return len(self.source())

    def source(self) -> str:
        return Writer(self).source()

    def smaller(self) -> Iterator[Program]:
        """Programs with something left out, those with the most first."""
        plain_loss = Placed(PLAIN_LOSSES[self.head.piece.name], self.loss.number)
        plain_optimizer = Placed(PLAIN_OPTIMIZER, self.optimizer.number)
        usual = dict(form="tuple", inline=False, returns="loss", steps="training_step(self, batch, batch_idx)")
        bare = dict(usual, options=(), extras=(), validates=False, epochs=1, optimizer=plain_optimizer)
        if len(self.groups) > 1:
            yield from (replace(self, groups=(group,)) for group in self.groups)
        yield replace(self, groups=())
        yield replace(self, **bare, loss=plain_loss)
        yield replace(self, **bare)
        yield replace(self, **dict(bare, extras=self.extras), loss=plain_loss)
        for i in range(len(self.groups)):
            yield replace(self, groups=self.groups[:i] + self.groups[i + 1 :])
        for i in range(len(self.extras)):
            yield replace(self, extras=self.extras[:i] + self.extras[i + 1 :])
        for i, group in enumerate(self.groups):
            if group.kind == "block" and all(one.piece.at == "any" for one in group.placed):
                yield self._with(i, replace(group, kind="net", times=1))
            if group.times > 1:
                yield self._with(i, replace(group, times=1))
            for j in range(len(group.placed) if len(group.placed) > 1 else 0):
                yield self._with(i, replace(group, placed=group.placed[:j] + group.placed[j + 1 :]))
        for i in range(len(self.options)):
            yield replace(self, options=self.options[:i] + self.options[i + 1 :])
        if self.validates:
            yield replace(self, validates=False)
        if self.epochs > 1:
            yield replace(self, epochs=1)
        for name, plain in usual.items():
            if getattr(self, name) != plain:
                yield replace(self, **{name: plain})
        batch = dict(self.sizes)["B"]
        for samples in (batch, 2 * batch):
            if samples < self.samples:
                yield replace(self, samples=samples)
        if self.loss.piece is not plain_loss.piece:
            yield replace(self, loss=plain_loss)
        if self.optimizer.piece is not PLAIN_OPTIMIZER:
            yield replace(self, optimizer=plain_optimizer)

    def _with(self, i: int, group: Group) -> Program:
        return replace(self, groups=(*self.groups[:i], group, *self.groups[i + 1 :]))


class Writer:
    """The source text of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = dict(program.sizes)

    def text(self, template: str, placed: Placed, indent: int) -> str:
        """The lines of a template, with its names filled in; empty where there are none."""
        lines = textwrap.dedent(template.strip("\n")).rstrip()
        if not lines:
            return ""
        for name, size in self.sizes.items():
            lines = lines.replace(f"${name}", str(size))
        return textwrap.indent(lines.replace("$i", str(placed.number)), " " * indent) + "\n"

    def source(self) -> str:
        p = self.program
        tops = [self.text(one.piece.top, one, 0) for one in p.all_placed()]
        blocks = [self._block(group) for group in p.groups if group.kind == "block"]
        parts = [
            f'"""Seed {p.seed}: {", ".join(p.names)}."""\n',
            IMPORTS,
            *dict.fromkeys(top for top in tops if top),
            *blocks,
            self._net(),
            self._data(),
            self._main(),
        ]
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"

    def _block(self, group: Group) -> str:
        lines = f"class Block{group.number}(nn.Module):\n"
        lines += "".join(self.text(one.piece.body, one, 4) for one in group.placed)
        lines += "    def __init__(self):\n        super().__init__()\n"
        lines += "".join(self.text(one.piece.init, one, 8) for one in group.placed)
        lines += "\n    def forward(self, h):\n"
        lines += "".join(self.text(one.piece.glue, one, 8) for one in group.placed)
        return lines + "        return h\n"

    def _net_placed(self) -> list[Placed]:
        """What lies in the LightningModule itself."""
        p = self.program
        inner = [one for group in p.groups if group.kind == "net" for one in group.placed]
        return [p.stem, *inner, p.head, p.loss, *p.extras, p.optimizer]

    def _forward(self) -> str:
        p = self.program
        lines = self.text(p.stem.piece.glue, p.stem, 8)
        for group in p.groups:
            if group.kind == "block":
                lines += f"        h = self.block{group.number}(h)\n" * group.times
            else:
                lines += "".join(self.text(one.piece.glue, one, 8) for one in group.placed)
        lines += "".join(self.text(one.piece.glue, one, 8) for one in p.extras)
        return lines + self.text(p.head.piece.glue, p.head, 8)

    def _net(self) -> str:
        p = self.program
        own = self._net_placed()
        lines = "class Net(L.LightningModule):\n"
        lines += "".join(self.text(one.piece.body, one, 4) for one in own)
        lines += "    def __init__(self):\n        super().__init__()\n"
        lines += self.text(p.stem.piece.init, p.stem, 8)
        for group in p.groups:
            if group.kind == "block":
                lines += f"        self.block{group.number} = Block{group.number}()\n"
            else:
                lines += "".join(self.text(one.piece.init, one, 8) for one in group.placed)
        for one in (p.head, p.loss, *p.extras, p.optimizer):
            lines += self.text(one.piece.init, one, 8)
        lines += "\n    def forward(self, x):\n" + self._forward() + "        return out\n"
        lines += f"\n    def {p.steps}:\n" + self._unpack(p.steps)
        lines += "".join(self.text(one.piece.before, one, 8) for one in own)
        lines += self._forward() if p.inline else "        out = self(x)\n"
        lines += self.text(p.loss.piece.glue, p.loss, 8)
        lines += "".join(self.text(one.piece.after, one, 8) for one in own)
        lines += "        self.log('loss', loss)\n" + f"        return {p.returns}\n"
        if p.validates:
            lines += "\n    def validation_step(self, batch, batch_idx):\n" + self._unpack("batch, batch_idx")
            lines += "        out = self(x)\n" + self.text(p.loss.piece.glue, p.loss, 8)
            lines += "        self.log('val_loss', loss)\n"
        lines += "\n    def predict_step(self, batch, batch_idx):\n" + self._unpack("batch, batch_idx")
        lines += "        return self(x)\n"
        for name, arguments in SIGNATURES.items():
            bodies = [self.text(one.piece.hooks.get(name, ""), one, 8) for one in own]
            if any(bodies):
                lines += f"\n    def {name}({', '.join(filter(None, ('self', arguments)))}):\n" + "".join(bodies)
        for one in own:
            for signature, body in one.piece.net.items():
                lines += f"\n    def {signature.replace('$i', str(one.number))}:\n" + self.text(body, one, 8)
        return lines

    def _unpack(self, signature: str) -> str:
        pick = "batch = args[0]; batch_idx = args[1]\n        " if "*args" in signature else ""
        fields = {
            "tuple": "x, y, w, m = batch",
            "list": "x, y, w, m = batch",
            "named": "x, y, w, m = batch.x, batch.y, batch.w, batch.m",
            "dict": "x, y, w, m = (batch[k] for k in 'xywm')",
            "strings": "x, y, w, m = (batch[k] for k in 'xywm')",
            "nested": "(x, y), extra = batch; w, m = extra['w'], extra['m']",
        }[self.program.form]
        return f"        {pick}{fields}\n"

    def _data(self) -> str:
        p = self.program
        collect = {
            "tuple": "",
            "list": ", collate_fn=lambda s: [torch.stack(c) for c in zip(*s)]",
            "named": ", collate_fn=lambda s: Batch(*(torch.stack(c) for c in zip(*s)))",
            "dict": ", collate_fn=lambda s: dict(zip('xywm', (torch.stack(c) for c in zip(*s))))",
            "strings": ", collate_fn=lambda s: dict(zip('xywm', (torch.stack(c) for c in zip(*s))), "
            "kind=['ab'[int(r[2] > 1)] for r in s])",
            "nested": ", collate_fn=lambda s: (lambda x, y, w, m: ((x, y), dict(w=w, m=m)))"
            "(*(torch.stack(c) for c in zip(*s)))",
        }[p.form]
        named = "Batch = collections.namedtuple('Batch', 'x y w m')\n\n\n" if p.form == "named" else ""
        x = self.text(dict(STEM_DATA)[p.stem.piece.name], p.stem, 0).strip()
        y = self.text(dict(HEAD_DATA)[p.head.piece.name], p.head, 0).strip()
        mask = "(B, T)" if p.head.piece.name == "per_token" else "(B,)"
        return named + textwrap.dedent(f"""
            def loader(seed, B={p.samples}, T={self.sizes["T"]}):
                g = torch.Generator().manual_seed(seed)
                x = {x}
                y = {y}
                w = torch.rand(B, generator=g) + 0.5
                m = torch.rand({mask}, generator=g) > 0.3
                samples = list(zip(x, y, w, m))
                return DataLoader(samples, batch_size={self.sizes["B"]}{collect})
            """)

    def _main(self) -> str:
        p = self.program
        options = {"max_epochs": str(p.epochs)} | dict(p.options)
        callbacks = []
        for one in p.all_placed():
            for name, value in one.piece.options.items():
                if name == "callbacks":
                    callbacks.append(value)
                else:
                    options[name] = value
        if callbacks:
            options["callbacks"] = f"[{', '.join(callbacks)}]"
        lines = ", ".join(f"{name}={value}" for name, value in options.items())
        return textwrap.dedent(f"""
            def options():
                return dict({lines})


            if __name__ == "__main__":
                from tests.fuzz.__main__ import main

                main(["--script", __file__])
            """)


STEM_DATA = (
    ("tokens", "torch.randint(0, $V, (B, T), generator=g)"),
    ("tokens_positions", "torch.randint(0, $V, (B, T), generator=g)"),
    ("tokens_padded", "torch.randint(0, $V, (B, T), generator=g)"),
    ("series", "torch.randn(B, T, 3, generator=g)"),
    ("vectors", "torch.randn(B, 5, generator=g)"),
    ("patches", "torch.randn(B, 3, 4, 4, generator=g)"),
    ("convolution", "torch.randn(B, 3, 6, 6, generator=g)"),
)
HEAD_DATA = (
    ("per_token", "torch.randint(0, $V, (B, T), generator=g)"),
    ("classes", "torch.randint(0, $V, (B,), generator=g)"),
    ("numbers", "torch.randn(B, 3, generator=g)"),
)
