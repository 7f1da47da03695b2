"""Why a step has no schedule: told by its trials, before any of it has run."""

from __future__ import annotations


class NoScheduleError(ValueError):
    """A step can't run in stages, each of which runs its part of it.

    Attributes:
        by_units: whether it can run layer by layer: see `lightning_par.pipeline.between_steps.units.unit_by_unit`.
    """

    by_units = True


def by_hand(module: object) -> str:
    """Why the steps of ``module`` have none where they run their backwards themselves."""
    return (
        f"{type(module).__name__} optimizes by hand (automatic_optimization = False): a schedule runs the backwards "
        "once the step has returned."
    )


class UnscheduledError(Exception):
    """A step is about to run for which there is no schedule; all ranks know it."""


class OthersUnscheduledError(UnscheduledError):
    """There is none for that of another replica, with which this one gathers weights."""
