"""Amounts of memory as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{kind}b": base ** (power + 1)
    for kind, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt")
}


def parse_bytes(value: object, what: str) -> int:
    """The number of bytes that ``value`` says.

    Args:
        value: a positive int, or a number with B, kB, MB, GB or TB (thousands), or with KiB, MiB, GiB or TiB (1024s).
        what: whose value it is, for messages.

    Raises:
        TypeError: it is neither an int nor a str.
        ValueError: it says no positive amount.

    Example::

        assert parse_bytes("1.5 GB", "max_memory[0]") == 1_500_000_000 and parse_bytes("2KiB", "") == 2048
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{what} must be a number of bytes or a str such as '2GB', not {value!r}.")
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", str(value))
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(
            f"{what} = {value!r} is no amount of memory; write e.g. '2GB', '512 MiB' or a number of bytes."
        )
    count = int(float(found[1]) * _UNITS[found[2].lower()]) if found[2] or "." in found[1] else int(found[1])
    if count < 1:
        raise ValueError(f"{what} = {value!r} leaves no memory; write e.g. '2GB'.")
    return count


def parse_limits(limits: Any) -> dict[int, int]:
    """The bytes of each device that has a limit.

    Raises:
        TypeError: ``limits`` is no mapping of ints to amounts.
        ValueError: an index is negative, or an amount is none.

    Example::

        assert parse_limits({0: "2GB", 1: 500}) == {0: 2_000_000_000, 1: 500}
    """
    if limits is None:
        return {}
    if not isinstance(limits, Mapping):
        raise TypeError(f'max_memory must map devices to amounts, as {{0: "2GB", 1: "4GB"}}, got {limits!r}.')
    for place in limits:
        if not isinstance(place, int) or isinstance(place, bool):
            raise TypeError(f"max_memory: a device must be its index, an int, not {place!r}.")
        if place < 0:
            raise ValueError(f"max_memory names device {place}, which is negative: devices count from 0.")
    return {place: parse_bytes(value, f"max_memory[{place}]") for place, value in limits.items()}
