"""How long a rank waits for others until that is reported."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

Asked = timedelta | float | Literal["auto"] | None
_LONGEST = 300.0  # seconds


def seconds_until_report(asked: Asked, timeout: timedelta | None) -> float | None:
    """The seconds that ``hang_report_after`` means; None where nothing is to be reported.

    Args:
        asked: what the user wrote.
        timeout: that of the process group, by which a wait ends in an error.

    Raises:
        ValueError: it is no time, or not shorter than ``timeout``.

    Example::

        assert seconds_until_report("auto", timedelta(minutes=30)) == 300.0
        assert seconds_until_report("auto", timedelta(minutes=1)) == 30.0
    """
    limit = None if timeout is None else timeout.total_seconds()
    if asked is None:
        return None
    if asked == "auto":
        return _LONGEST if limit is None else min(_LONGEST, limit / 2)
    if isinstance(asked, bool) or not isinstance(asked, timedelta | int | float):
        raise ValueError(
            f"hang_report_after={asked!r} is no time: write seconds, a timedelta, 'auto', or None for no report."
        )
    seconds = asked.total_seconds() if isinstance(asked, timedelta) else float(asked)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"hang_report_after={asked!r} must be more than 0 seconds; None makes no report.")
    if limit is not None and seconds >= limit:
        raise ValueError(
            f"hang_report_after={asked!r} is {seconds:g} s, but after timeout={limit:g} s the wait has ended in an "
            f"error. Write hang_report_after={limit / 2:g} or less, or a longer timeout."
        )
    return seconds
