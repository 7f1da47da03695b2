"""The ranks meet at a key-value store before a process group connects them, and tell each other what is in the way.

torch connects in silence, for as long as the process group's timeout: to a name that nobody knows, an address that no
packet reaches, a rank that never started. Here each wait is said after some seconds, and ends with an error on all
ranks that have met, which has the user's own values.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import DistError, PrefixStore, Store, TCPStore

UNRESOLVED = timedelta(minutes=2)
"""How long a name may be unknown: a cluster's name service learns of a host once that has started."""
_SERVING = timedelta(minutes=1)  # for the rank that serves the store to reach itself by the name that others use
_ATTEMPT = 10.0  # seconds
_SILENCE = 20.0  # seconds after which a wait is said, and again
_READING = 2.0  # seconds that others get to read of an error, before the store ends with its server
_START, _JOINED = "lightning_par/start", "joined"


@dataclass(frozen=True)
class Address:
    """Where the store is, and what says so: the variables ``MASTER_ADDR`` and ``MASTER_PORT``, or what stands for them.

    Example::

        assert str(Address("host0", 29500)) == "MASTER_ADDR='host0', MASTER_PORT=29500"
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"MASTER_ADDR={self.host!r}, MASTER_PORT={self.port}"


class Rendezvous:
    """One start of the job's ranks at their store.

    A store outlives a start where a launcher starts ranks again, as torchrun does: each start has keys of its own.

    Args:
        address: of the store.
        rank: this process' number by its launcher.
        world_size: how many ranks there are.
        timeout: for how long ranks wait for each other.

    Raises:
        RuntimeError: the store can't be reached, or ranks did not come in time.

    Example::

        rendezvous = Rendezvous(Address("localhost", 29500), 0, 1, timedelta(minutes=1))
        assert rendezvous.exchange("names", "a") == ["a"]
    """

    def __init__(self, address: Address, rank: int, world_size: int, timeout: timedelta) -> None:
        self.address, self.rank, self.world_size, self.timeout = address, rank, world_size, timeout
        self._end = time.monotonic() + timeout.total_seconds()
        self._serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store = self._connected()
        self._store.set_timeout(timeout)
        self._own = secrets.token_hex(8)
        self._start = ""  # the beginning of this start's keys, once it is known
        with self._served():
            self._join()

    @property
    def store(self) -> Store:
        """For a process group of this start."""
        return PrefixStore(f"default_pg/{self._start}", self._store)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank. All ranks must call it.

        Args:
            what: a name of its own in this start.
            value: what JSON can say.

        Raises:
            RuntimeError: a rank did not come in time.
        """
        keys, all_key = self._keys(what), f"{self._start}/{what}/all"
        with self._served():
            self._store.set(keys[self.rank], json.dumps(value))
            if self.rank == 0:  # gathered once: not a message for each two ranks
                self._wait(lambda: self._store.check(keys), what)
                self._store.set(all_key, json.dumps([json.loads(told) for told in self._store.multi_get(keys)]))
            self._wait(lambda: self._store.check([all_key]), what)
            return [*json.loads(self._store.get(all_key))]

    def agree(self, what: str, error: str | None) -> None:
        """Raise on all ranks what is in the way of any. All ranks must call it.

        Args:
            what: as in `exchange`.
            error: of this rank.

        Raises:
            RuntimeError: the errors of the ranks that have one.
        """
        errors = self.exchange(what, error)
        if any(errors):
            self._fail("\n".join(f"Rank {rank}: {text}" for rank, text in enumerate(errors) if text))

    # --------------------------------------------------------------------------------------------------- how it is done

    def _connected(self) -> Store:
        if not self._serves:
            self._reach()
        try:
            return TCPStore(
                self.address.host,
                self.address.port,
                self.world_size,
                is_master=self._serves,
                timeout=min(self.timeout, _SERVING) if self._serves else self.timeout,
                wait_for_workers=False,
                multi_tenant=self._serves,
                use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
            )
        except RuntimeError as error:
            raise RuntimeError(self._not_reached(str(error).partition("\n")[0])) from error

    def _reach(self) -> None:
        """Wait for the store's server: its host may still start, and its name be known still later."""
        since = said = time.monotonic()
        while True:
            end = self._end
            try:
                left = max(0.1, min(_ATTEMPT, end - time.monotonic()))
                socket.create_connection((self.address.host, self.address.port), left).close()
                return
            except socket.gaierror as error:
                why = f"{self.address.host!r} can't be resolved: {error.strerror}"
                end = min(end, since + UNRESOLVED.total_seconds())
            except OSError as error:
                why = error.strerror or str(error)
            now = time.monotonic()
            if now >= end:
                raise RuntimeError(self._not_reached(f"{why}, for {now - since:.0f} s"))
            if now - said > _SILENCE:
                said = now
                _say(f"Rank {self.rank} waits for the ranks' store at {self.address} since {now - since:.0f} s: {why}.")
            time.sleep(max(0.0, min(0.5, end - now)))

    def _not_reached(self, why: str) -> str:
        if self._serves:
            return (
                f"Rank 0 can't serve the ranks' store at {self.address}: {why}. It does so on the host where it runs, "
                f"{socket.gethostname()!r}: let MASTER_ADDR be an address of that host that all hosts can reach, and "
                "MASTER_PORT a free port of it."
            )
        return (
            f"Rank {self.rank} can't reach the ranks' store at {self.address}: {why}. Let MASTER_ADDR be an address of "
            f"the first rank's host that this one, {socket.gethostname()!r}, can reach (`getent hosts NAME` shows what "
            "a name stands for here), and the firewall pass MASTER_PORT."
        )

    def _join(self) -> None:
        """The first rank draws the beginning of the keys. Others may find what an earlier start has left, where nobody
        knows of them, until the first rank has replaced it."""
        if self.rank == 0:
            self._start = f"{_START}/{self._own}"
            self._store.set(self._keys(_JOINED)[0], self._own)
            self._store.set(_START, self._start)
        self._wait(self._are_all_in if self.rank == 0 else self._is_in, _JOINED)

    def _are_all_in(self) -> bool:
        if self._store.get(_START).decode() != self._start:
            self._fail(
                f"Two processes have started as rank 0 at {self.address}. Start those of each host by torchrun or by "
                "srun, or let NODE_RANK say which host it is; two jobs need ports of their own."
            )
        if not self._store.check(self._keys(_JOINED)):
            return False
        self._store.set(f"{self._start}/{_JOINED}", json.dumps(self._come()))
        return True

    def _is_in(self) -> bool:
        if not self._store.check([_START]):
            return False
        start = self._store.get(_START).decode()
        if start != self._start:
            self._start = start
            self._store.set(self._keys(_JOINED)[self.rank], self._own)
        known = f"{start}/{_JOINED}"
        return self._store.check([known]) and self._own in json.loads(self._store.get(known))

    def _come(self) -> list[str]:
        """By what the ranks go that have joined so far."""
        there = [key for key in self._keys(_JOINED) if self._store.check([key])]
        return [told.decode() for told in self._store.multi_get(there)]

    def _keys(self, what: str) -> list[str]:
        return [f"{self._start}/{what}/{rank}" for rank in range(self.world_size)]

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Until ``done``, with a word now and then of who has not told ``what``."""
        since = said = time.monotonic()
        pause = 0.001
        while not done():
            now = time.monotonic()
            error = f"{self._start}/error/{self._own}"
            if self._store.check([error]):
                raise RuntimeError(self._store.get(error).decode())
            if now > self._end or now - said > _SILENCE:
                said = now
                text = f"Rank {self.rank} waits since {now - since:.0f} s for {self._missing(what)} at {self.address}"
                if now > self._end:
                    self._fail(
                        f"{text}, and the timeout is {self.timeout.total_seconds():.0f} s. Who is missing has not "
                        "started, has ended, or can't reach that address: see what it printed, whether each host got "
                        "its number of processes, and whether the address stands for the same host everywhere."
                    )
                _say(f"{text}.")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.25)

    @contextmanager
    def _served(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            why = str(error).partition("\n")[0]
            raise RuntimeError(
                f"Rank {self.rank}: the ranks' store at {self.address} has ended ({why}). The rank or launcher that "
                "served it failed: see what it printed."
            ) from error

    def _missing(self, what: str) -> str:
        missing = [rank for rank, key in enumerate(self._keys(what)) if not self._start or not self._store.check([key])]
        ranks = ", ".join(map(str, missing)) or "0"
        return f"rank{'s' * (len(missing) > 1)} {ranks}"

    def _fail(self, text: str) -> NoReturn:
        for own in self._come() if self._start else ():
            self._store.set(f"{self._start}/error/{own}", text)
        if self._serves:
            time.sleep(_READING)
        raise RuntimeError(text)


def _say(text: str) -> None:
    print(f"lightning_par: {text}", file=sys.stderr, flush=True)
