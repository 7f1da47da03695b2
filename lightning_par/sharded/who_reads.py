"""Whether torch's and our own code reads something, or code of the user's kind, Lightning's among it."""

from __future__ import annotations

import types

from lightning_par.trial.memo import Memo

_INNER = ("lightning_par.", "torch.")


def is_inner(frame: types.FrameType) -> bool:
    """Whether the code that runs in ``frame`` is torch's or our own, and not of the user's kind."""
    return _inner[frame.f_globals.get("__name__", ""), frame.f_code.co_name]


def makes_fakes(frame: types.FrameType | None) -> bool:
    """Whether torch asks, behind our own code where ``frame`` is of that, to make a fake of a tensor: it looks at all
    that a tensor has."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("lightning_par.sharded.patches."):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch._subclasses.")


def _is_inner(place: tuple[str, str]) -> bool:
    module, function = place
    zeroes = module == "torch.nn.modules.module" and function == "zero_grad"
    return module.startswith(_INNER) and not zeroes and module != "torch.nn.utils.clip_grad"


_inner = Memo(_is_inner)  # by the names of a Python module and of a function
