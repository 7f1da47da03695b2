"""The other ranks of a run, asked without process group and store, which may be what stands still."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from lightning_par.hang_report.processes import Process
from lightning_par.hang_report.rank_state import Answer, RankState
from lightning_par.mesh.side_channel import call

_AT_ONCE = 64  # ranks that are asked at a time
_GONE = "nothing listens there any more: its process has ended, or goes on without the run"


@dataclass(frozen=True)
class Peer:
    """A rank, as it is reached.

    Attributes:
        address: host, port and secret; None where it could not listen.
        process: its process.
    """

    address: tuple[str, int, str] | None
    process: Process

    def ask(self, question: Any, patience: float, confirm: Callable[[], bool] = lambda: False) -> Any:
        """What it answers.

        Args:
            question: what JSON can say.
            patience: seconds.
            confirm: once the answer has come, whether to say so: it does nothing before that.

        Raises:
            OSError: it does not.
        """
        if self.address is None:
            raise OSError("it could not listen for questions")
        with call(self.address, question, patience) as line:
            answer = line.hear()
            if confirm():
                line.say("heard")
            return answer


def ask_all(
    peers: dict[int, Peer], ranks: Iterable[int], question: Any, patience: float, most: float
) -> dict[int, RankState]:
    """The states of ``ranks``: what each answers, or what is known of one that does not.

    Args:
        peers: all ranks.
        ranks: those that are asked, many at a time.
        question: to which the answer is a state.
        patience: seconds for each answer.
        most: seconds for all of them; who was not asked by then is taken not to answer.
    """
    ranks = [*ranks]
    if not ranks:
        return {}
    end = time.monotonic() + most
    with ThreadPoolExecutor(min(_AT_ONCE, len(ranks)), "lightning_par hang report") as executor:
        asked = {rank: executor.submit(_state_of, rank, peers[rank], question, patience, end) for rank in ranks}
        wait([*asked.values()])
    return {rank: future.result() for rank, future in asked.items()}


def _state_of(rank: int, peer: Peer, question: Any, patience: float, end: float) -> RankState:
    try:
        if time.monotonic() > end:
            raise TimeoutError("there was no time to ask it")
        return RankState.from_json(peer.ask(question, patience))
    except (OSError, TypeError, ValueError, KeyError) as error:
        return not_answering(rank, peer, error)


def not_answering(rank: int, peer: Peer, error: BaseException) -> RankState:
    """What is known of a rank that ``error`` came from instead of an answer.

    That its process has ended is said only where this host's system says so.
    """
    process = peer.process
    ended = process.has_ended()
    answer: Answer = "ended" if ended else "left" if isinstance(error, ConnectionRefusedError) else "silent"
    left = _GONE if ended is None else "its process still runs"
    said = {"left": left, "silent": process.said()}.get(answer, "")
    return RankState(rank, answer, process.host, process.pid, said)
