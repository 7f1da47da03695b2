"""What one step of a rank holds and sends, counted while it runs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.checkpoint.file_cost import FileCost
from lightning_par.dry.other_stages import UnknownStateError
from lightning_par.mesh.ledger import ledger
from lightning_par.sharded.tensor import leaf
from lightning_par.strategies.startup_table import bytes_text, format_rows


@dataclass
class Counts:
    """Of one rank and one step of the optimizer, in bytes.

    Attributes:
        title: of which rank of what.
        parameters: that it holds.
        gradients: of them, as the optimizer meets them.
        optimizer: the optimizer's state.
        kept: that lived before the step began: weights, buffers, the optimizer's state, what the module keeps.
        peak: the most that lived at one time in the step, ``kept`` and all.
        sent: by the ledger's axis and purpose.
        messages: by axis, purpose and verb, how many calls.
        saved: that it writes to a distributed checkpoint, and as how many tensors or parts of them; None where that
            is not known.
        file: what a checkpoint in a single file costs it; None where that is not known.
        untold: why these are not known, where they are not.
        apart: whose ``on_save_checkpoint`` may add to a checkpoint what is not counted: classes by their names.
    """

    title: str = ""
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    kept: int = 0
    peak: int = 0
    sent: dict[tuple[str, str], float] = field(default_factory=dict)
    messages: dict[tuple[str, str, str], int] = field(default_factory=dict)
    saved: tuple[int, int] | None = None
    file: FileCost | None = None
    untold: str | None = None
    apart: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        names = ("parameters", "gradients", "optimizer", "kept", "peak")
        sent = [
            {"axis": axis, "purpose": purpose, "bytes": size, "messages": self._verbs(axis, purpose)}
            for (axis, purpose), size in self.sent.items()
        ]
        saved = None if self.saved is None else dict(zip(("bytes", "tensors"), self.saved))
        return {
            **{name: getattr(self, name) for name in names},
            "sent": sent,
            "distributed_checkpoint": saved,
            "single_file_checkpoint": None if self.file is None else asdict(self.file),
            "checkpoints_not_known": self.untold,
            "checkpoints_without_on_save_checkpoint_of": list(self.apart),
        }

    def json(self) -> str:
        return json.dumps(self.as_dict())

    def __str__(self) -> str:
        held = ((name, getattr(self, name)) for name in ("parameters", "gradients", "optimizer", "peak"))
        rows = [("axis", "purpose", "bytes sent", "messages")]
        for (axis, purpose), size in self.sent.items():
            verbs = self._verbs(axis, purpose)
            rows.append((axis, purpose, f"{size:,.0f}", ", ".join(f"{n} {verb}" for verb, n in verbs.items())))
        memory = ", ".join(f"{name} {bytes_text(size)}" for name, size in held)
        lines = [self.title, f"Memory: {memory}.", *(format_rows(rows) if self.sent else ["Nothing is sent."])]
        if self.saved is not None:
            size, count = self.saved
            what = "1 tensor or a part of one" if count == 1 else f"{count} tensors or parts of them"
            lines.append(f"To a distributed checkpoint it writes {bytes_text(size)}, {what}.")
        if self.file is not None:
            lines.append(self._file_line(self.file))
        if self.apart:
            lines.append(f"What on_save_checkpoint of {', '.join(self.apart)} adds to a checkpoint is not counted.")
        if self.untold is not None:
            lines.append(f"What a checkpoint takes is not known: {self.untold}.")
        return "\n".join(lines)

    @staticmethod
    def _file_line(cost: FileCost) -> str:
        does = [f"sends {bytes_text(cost.sent)} in {cost.messages} messages"] if cost.messages else []
        does += [f"receives {bytes_text(cost.received)}"] if cost.received else []
        does += [f"writes {bytes_text(cost.written)}"] if cost.written else []
        does += [f"holds {bytes_text(cost.held)} of it at a time"] if cost.held else []
        return f"For a checkpoint in a single file it {', '.join(does) or 'does nothing'}."

    def _verbs(self, axis: str, purpose: str) -> dict[str, int]:
        return {verb: n for (a, p, verb), n in self.messages.items() if (a, p) == (axis, purpose)}


class StepEndedError(BaseException):
    """The step that was to be looked at has ended: nothing else of the run is wanted. No error that user code takes."""


class CountMixin:
    """Counts the second step of the optimizer, or of all that one batch steps, and ends the run behind it.

    Attributes:
        saves: whether it finds out what a checkpoint would take, too.
    """

    saves: bool

    def __init__(self) -> None:
        self.found = Counts()
        self._open: Any = None
        self._begun = 0  # steps before it
        self._kept = False  # whether it is noted what lived before

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.found.parameters = sum(map(_bytes, _held(module)))

    def come(self, trainer: Any) -> None:
        """A batch is about to be moved to the device, and sent to the ranks of its replica."""
        if self._open is None and trainer.global_step:
            self._begun = trainer.global_step
            self._open = ledger()
            self.moved = self._open.__enter__()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self._open is not None and not self._kept:
            self._kept, live = True, trainer.strategy.live
            self.found.kept = live.peak = live.now

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        held = _held(module)
        self.found.parameters = sum(map(_bytes, held))
        self.found.gradients = max(self.found.gradients, sum(_bytes(x.grad) for x in held if x.grad is not None))

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if self._open is None or trainer.global_step == self._begun:
            return
        behind = trainer.callbacks[trainer.callbacks.index(self) + 1 :]
        for callback in behind:
            callback.on_train_batch_end(trainer, module, *args)
        module.on_train_batch_end(*args)
        self.close()
        found = self.found
        found.peak = trainer.strategy.live.peak
        states = [x for one in trainer.optimizers for state in _own(one).values() for x in state.values()]
        found.optimizer = sum(_bytes(leaf(x)) for x in states if isinstance(x, Tensor) and not is_elsewhere(x))
        sent: dict[tuple[str, str], float] = defaultdict(float)
        for transfer in self.moved.transfers:
            sent[transfer.axis, transfer.purpose] += transfer.sent
        found.sent = {key: sent[key] for key in sorted(sent)}
        found.messages = dict(Counter(self.moved.counts()))
        found.apart = tuple(type(x).__name__ for x in (module, *trainer.callbacks) if _adds(x))
        if self.saves:
            self._look_at_checkpoint(trainer)
        raise StepEndedError

    def _look_at_checkpoint(self, trainer: Any) -> None:
        try:
            chunks, self.found.file = trainer.strategy.planned_checkpoint()
            self.found.saved = sum(_bytes(x.values) for x in chunks), len(chunks)
        except UnknownStateError as error:
            self.found.untold = str(error)

    def close(self) -> None:
        """The ledger is closed, however the run has ended."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)


def _adds(x: Any) -> bool:
    """Whether ``x``, a module or a callback, has a hook of its own that may add to a checkpoint."""
    return sum("on_save_checkpoint" in vars(kind) for kind in type(x).__mro__) > 1  # one is Lightning's


def _held(module: Any) -> list[Tensor]:
    return [leaf(x) for x in module.parameters() if not is_elsewhere(x)]


def _own(optimizer: Any) -> Any:
    """Without asking other stages."""
    return getattr(optimizer.state, "own", optimizer.state)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
