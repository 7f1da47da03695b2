"""A piece of a program: a few lines of a user's module, which can be left out and leave a program."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Piece:
    """Lines of source text. ``$C`` is the width of ``h``, ``$i`` a number of the piece's own, ``$T`` the tokens.

    Args:
        name: says what it is.
        glue: lines of `forward`, which change ``h``, of shape (B, T, C) or (B, C).
        init: lines of the module's ``__init__``.
        top: classes, functions and globals before the modules.
        body: lines of the class body.
        before: lines of the step before the forward pass.
        after: lines of the step once there is a ``loss``.
        hooks: lines of the LightningModule's hooks, by their names.
        net: methods of the LightningModule, by their signature.
        options: arguments of the Trainer, as source text.
        on: the shapes of ``h`` that it takes.
        at: ``"any"`` module, or the LightningModule (``"net"``) alone, whose ``x`` it reads.
        draws: whether it draws from torch's generator, whose numbers a layout need not keep.
        weight: how often it is drawn, against others of its kind.
    """

    name: str
    glue: str = ""
    init: str = ""
    top: str = ""
    body: str = ""
    before: str = ""
    after: str = ""
    hooks: dict[str, str] = field(default_factory=dict)
    net: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    on: tuple[str, ...] = ("BTC", "BC")
    at: str = "any"
    draws: bool = False
    weight: float = 1.0

    def __hash__(self) -> int:
        return hash(self.name)
