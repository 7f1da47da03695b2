"""``python -m lightning_par stacks HOST:PORT``: where the ranks of a running job stand, told by any one of them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import Any

_ABOUT = """Prints what each rank of a running job does, and its Python stack; ranks that stand alike are shown once.
Any rank will do: the job tells the address of its first one when it starts, and in a hang report. Nothing in the job is
changed, nor can it be by this way."""


def add_stacks(commands: Any) -> None:
    """Add the command to the ``commands`` of a parser."""
    stacks: ArgumentParser = commands.add_parser(
        "stacks",
        help="print the Python stacks of all ranks of a running job",
        description=_ABOUT,
        formatter_class=RawDescriptionHelpFormatter,
    )
    stacks.add_argument("address", metavar="HOST:PORT", help="of any rank")
    stacks.set_defaults(run=show_stacks)


def show_stacks(asked: Namespace) -> int:
    """Run the command; returns its exit code.

    Raises:
        ValueError: the address is none, or no rank of a job answers there.
    """
    check_address(asked.address)
    # Only now, so that wrong arguments are told without waiting for torch.
    from lightning_par.hang_report.look import ask, stacks_text

    print("\n".join(stacks_text(ask(asked.address))))
    return 0


def check_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port".

    Raises:
        ValueError: it is no address.

    Example::

        assert check_address("host0:4000") == ("host0", 4000)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is no address: write HOST:PORT, as the job told it when it started.")
    return host.strip("[]"), int(port)
