"""A look at the ranks of a running job from outside: asked of one of them, and shown."""

from __future__ import annotations

from lightning_par.hang_report.command import check_address
from lightning_par.hang_report.culprit import find
from lightning_par.hang_report.rank_state import RankState, named
from lightning_par.hang_report.report import conclusion, groups
from lightning_par.mesh.side_channel import call

_PATIENCE = 60.0  # seconds: the rank that is asked waits for the others, of which some may not answer


def ask(address: str) -> list[RankState]:
    """The states of all ranks, as one of them tells.

    Args:
        address: "host:port" of that one.

    Raises:
        ValueError: it is no address, or no rank of a job answers there.
    """
    try:
        with call((*check_address(address), ""), "stacks", _PATIENCE) as line:
            told = line.hear()
        if isinstance(told, dict) and "failure" in told:
            raise ValueError(f"The rank at {address} could not tell: {told['failure']}.")
        if not isinstance(told, list) or not told:
            raise TypeError(told)
        return [RankState.from_json(state) for state in told]
    except OSError as error:
        raise ValueError(
            f"No rank answers at {address}: {error}. The job may have ended, or this host can't reach that one."
        ) from None
    except (TypeError, KeyError) as error:
        raise ValueError(f"What answers at {address} is no rank of a job: {error!r}.") from None


def stacks_text(states: list[RankState]) -> list[str]:
    """What is printed: what each rank does, who holds up the others, and stacks, equal ones once."""
    finding = find(states)
    stacks: dict[str, list[int]] = {}
    for state in states:
        stacks.setdefault(state.stack, []).append(state.rank)
    lines = groups(states, {} if finding is None else finding.waits)
    # A moment's wait is no hang: it takes none of them long.
    if finding is not None:
        lines.append("Now, which is no more than a moment's look: " + conclusion(finding, {s.rank: s for s in states}))
    for stack, ranks in stacks.items():
        lines += [f"Python stack of {named(ranks)}:", stack.rstrip("\n") or "  It can't be had."]
    return lines
