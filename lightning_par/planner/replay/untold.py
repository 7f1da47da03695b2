"""What to say of a function of a recorded step that can't be run again without values."""

from __future__ import annotations

from lightning_par.private.fake_tensors import WITHOUT_VALUE
from lightning_par.trial.recording import Event


class UntoldError(ValueError):
    """What a layout sends can't be told from a step without values; says where it goes by them."""


def untold(event: Event, error: Exception) -> UntoldError:
    """What to raise where the function of ``event`` has raised ``error``."""
    why = "goes by values, which a plan has none of"
    if not isinstance(error, WITHOUT_VALUE):
        first, _, _ = str(error).strip().partition("\n")
        why = f"can't be run again without values: {type(error).__name__}: {first[:200]}"
    return UntoldError(f"what is sent can't be told: {event.name} at {event.place} {why}")
