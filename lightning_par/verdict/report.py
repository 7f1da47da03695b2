"""The verdict: what was found under each layout, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_par.strategies.startup_table import format_rows, show_table
from lightning_par.verdict.compare import TOLERANCE, Finding

SHOWN = 5
_OF_PARAMETERS = ("initial weight", "gradient", "clipped gradient", "weight", "weight after all", "optimizer")
_HEADER = ("layout", "ranks", "verdict", "what was found")
_FLOAT32 = 1e-5


@dataclass(frozen=True)
class LayoutVerdict:
    """One layout's.

    Args:
        layout: its name.
        ranks: its axes, as ``"sequence 2 x tensor 2"``.
        state: ``"equal"`` to one device, ``"differs"`` from it, or ``"refused"``: it did not train to the end.
        message: of the refusal.
        findings: what differs, in the order of a step: weights, loss, gradients, and so on.
    """

    layout: str
    ranks: str
    state: Literal["equal", "differs", "refused"]
    message: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def parameters(self) -> dict[str, float]:
        """The parameters that differ, worst first, with the largest relative difference in weight, gradient or
        optimizer state."""
        worst: dict[str, float] = {}
        for one in self.findings:
            if one.name and one.what.startswith(_OF_PARAMETERS):
                worst[one.name] = max(worst.get(one.name, 0.0), one.error)
        return dict(sorted(worst.items(), key=lambda item: -item[1]))

    def lines(self) -> list[str]:
        """What was found, a handful of lines."""
        if self.state != "differs":
            return [self.message]
        lines = [f"first: {self.findings[0]}"]
        for name, error in list(self.parameters.items())[:SHOWN]:
            where = next(one.what for one in self.findings if one.name == name and one.error == error)
            lines.append(f"{name}: {error:.1e} ({where})")
        rest = len(self.parameters) - SHOWN
        return [*lines, *([f"and {rest} more parameter{'s' * (rest > 1)}"] if rest > 0 else [])]


@dataclass(frozen=True)
class Verdict:
    """Whether a module's results are one device's under each layout; true if they are under all.

    Args:
        layouts: one each, in the order in which they were asked for.
        notes: what to know when reading it.
        steps: optimizer steps that were compared.
    """

    layouts: tuple[LayoutVerdict, ...]
    notes: tuple[str, ...] = ()
    steps: int = 2

    def __bool__(self) -> bool:
        return all(one.state == "equal" for one in self.layouts)

    def __str__(self) -> str:
        return "\n".join([self._title(), *format_rows([_HEADER, *self._rows()]), *self.footer()])

    def show(self) -> None:
        """Print the table, with rich where that is installed."""
        show_table(self._title(), _HEADER, self._rows(), self.footer(), wraps=3)

    def footer(self) -> list[str]:
        """The notes, and what the differences hint at."""
        errors = [one.error for layout in self.layouts for one in layout.findings]
        if not errors or max(errors) > _FLOAT32:
            return list(self.notes)
        return [*self.notes, "Differences are of the size of float32's rounding: does the module cast to float32?"]

    def _title(self) -> str:
        steps = f"{self.steps} step{'s' * (self.steps > 1)}"
        return f"Against one device, {steps} in float64, to {TOLERANCE:g}"

    def _rows(self) -> list[tuple[str, ...]]:
        return [(one.layout, one.ranks, one.state, "\n".join(one.lines())) for one in self.layouts]
