"""Whether nothing has moved is told as the cells themselves tell it."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.cells.mappings import BodyCell, MappingCell
from lightning_par.python_state.cells.names import NamesCell
from lightning_par.python_state.cells.sequences import SequenceCell
from lightning_par.python_state.still import Still
from lightning_par.python_state.training_modes import ModesCell

RATE, UNWATCHED = 1, 0


class Settings(dict[str, Any]):
    """As Lightning's ``hparams``."""


class Layer(nn.Module):
    scale = 1

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.counts, self.by_name = Counter(a=1), defaultdict[str, int](int, a=1)
        self.settings, self.ordered, self.listed = Settings(a=1), OrderedDict(a=1, b=2), [1]
        self.inner = nn.Linear(1, 1)


def _cells(layer: Layer) -> dict[str, Cell]:
    mappings = {name: getattr(layer, name) for name in ("counts", "by_name", "settings", "ordered")}
    return {
        **{name: MappingCell(name, mapping, mapping) for name, mapping in mappings.items()},
        "layer": MappingCell("layer", layer, vars(layer)),
        "body": BodyCell("body", Layer),
        "names": NamesCell("names", globals(), ("RATE",)),
        "list": SequenceCell("list", layer.listed),
        "modes": ModesCell({"inner": layer.inner}),
    }


def _set_global(value: int) -> None:
    globals()["RATE"] = value


MOVES: dict[str, tuple[Callable[[Layer], Any], Callable[[Layer], Any]]] = {
    "an attribute": (lambda x: setattr(x, "seen", 1), lambda x: setattr(x, "seen", 0)),
    "a count": (lambda x: x.counts.update("a"), lambda x: x.counts.subtract("a")),
    "an entry made by reading": (lambda x: x.by_name["b"], lambda x: x.by_name.pop("b")),
    "a setting": (lambda x: x.settings.update(a=2), lambda x: x.settings.update(a=1)),
    "an order": (lambda x: x.ordered.move_to_end("a"), lambda x: x.ordered.move_to_end("b")),
    "an item": (lambda x: x.listed.append(1), lambda x: x.listed.pop()),
    "a class": (lambda x: setattr(Layer, "scale", 2), lambda x: setattr(Layer, "scale", 1)),
    "a global": (lambda x: _set_global(2), lambda x: _set_global(1)),
    "a mode": (lambda x: x.inner.eval(), lambda x: x.inner.train()),
}


@pytest.mark.parametrize("what", MOVES)
def test_a_move_is_seen_and_so_is_that_it_was_taken_back(what: str) -> None:
    (move, back), layer, still = MOVES[what], Layer(), Still()
    cells = _cells(layer)
    assert still.is_so(cells) and still.is_so(cells)
    for _ in range(2):
        move(layer)
        assert not still.is_so(cells) and not still.is_so(cells) and any(cell.moved() for cell in cells.values())
        back(layer)
        assert still.is_so(cells) and still.is_so(cells)


def test_what_nobody_watches_does_not_count() -> None:
    cells, still = _cells(Layer()), Still()
    assert still.is_so(cells)
    globals()["UNWATCHED"] += 1
    assert still.is_so(cells)


def test_what_came_since_is_looked_at() -> None:
    cells, still, thing = _cells(Layer()), Still(), SimpleNamespace(a=1)
    assert still.is_so(cells)
    cells["thing"] = MappingCell("thing", thing, vars(thing))
    assert still.is_so(cells)
    thing.a = 2
    assert not still.is_so(cells)
