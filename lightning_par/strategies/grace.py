"""How long a job has once it is told to end, and what SLURM knows of that."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from datetime import timedelta
from typing import Any, Literal

GracePeriod = timedelta | float | Literal["auto"]

DEFAULT = 30.0
"""Seconds from SIGTERM to SIGKILL, where nothing else is said: SLURM, torchrun and Kubernetes agree on that."""
_PATIENCE = 5.0  # seconds


def check_grace_period(value: Any) -> GracePeriod:
    """
    Raises:
        ValueError: it is no time, or none is left.
        TypeError: it is of another type.
    """
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        raise ValueError(f"grace_period={value!r} is unknown; write 'auto', or seconds: grace_period=30.")
    if isinstance(value, bool) or not isinstance(value, timedelta | float | int):
        raise TypeError(f"grace_period must be seconds, a timedelta or 'auto', got {value!r}: write grace_period=30.")
    if not in_seconds(value) > 0:
        raise ValueError(f"grace_period={value!r} leaves no time; write how long a job has to end: grace_period=30.")
    return value


def in_seconds(value: timedelta | float) -> float:
    """A time as a number."""
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def seconds_left(period: GracePeriod, signum: int, on_slurm: bool, asks: bool = True) -> float:
    """How long there is from now until the job has to have ended.

    Args:
        period: what the user said; ``"auto"`` is SLURM's own where it is known, and `DEFAULT` else.
        signum: the signal that came now.
        on_slurm: whether the job runs under SLURM.
        asks: whether SLURM's controller may be asked, which one rank of a job does for all.
    """
    if period != "auto":
        return in_seconds(period)
    if not on_slurm:
        return DEFAULT
    if signum not in (signal.SIGTERM, signal.SIGINT):  # a warning ahead of the end
        left = float(os.environ.get("SLURM_JOB_END_TIME", 0)) - time.time()
        return left if left > 0 else DEFAULT
    return (kill_wait() if asks else None) or DEFAULT


def kill_wait() -> float | None:
    """Seconds from SIGTERM to SIGKILL in this cluster's configuration, None where it can't be read."""
    try:
        said = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=_PATIENCE).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"^KillWait\s*=\s*(\d+)", said, re.MULTILINE)
    return float(found[1]) if found and int(found[1]) else None


def requeue() -> str | None:
    """Have SLURM start this job again; what went wrong, None where nothing did."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = os.environ.get("SLURM_JOB_ID") if array is None else f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    if job is None or not re.fullmatch("[0-9_-]+", job):
        return f"SLURM_JOB_ID={job!r} is no job's number"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=6 * _PATIENCE)
    except (OSError, subprocess.SubprocessError) as error:
        return f"`scontrol requeue {job}`: {error}"
    return None if done.returncode == 0 else f"`scontrol requeue {job}` ended with {done.returncode}: {done.stderr}"
