"""Questions to another rank that a thread of its process answers, whatever its own code does meanwhile.

Collectives need all ranks to come. What one rank alone asks of others, as ``if trainer.is_global_zero: save(model)``
does, goes by connections of its own: TCP, on the network by which the ranks met. A rank tells where it listens, and a
secret that goes before each question, through the ranks' store.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from lightning_par.mesh.interfaces import address_towards, is_loopback
from lightning_par.private.process_groups import default_store, host_of_store, is_fake

_LENGTH = struct.Struct("!Q")
_LONGEST = 1 << 26  # bytes of a message: one in JSON may list an index each row of a table of words
_SILENCE = 60.0  # seconds
_QUESTION = 1 << 16  # bytes of the first message, of one that may be a stranger
_INTRODUCTION = 10.0  # seconds until it must be there
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Line:
    """One connection: messages in JSON, and tensors' bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def say(self, message: Any) -> None:
        """Send what JSON can say."""
        data = json.dumps(message).encode()
        self._connection.sendall(_LENGTH.pack(len(data)) + data)

    def hear(self, longest: int = _LONGEST) -> Any:
        """
        Raises:
            OSError: the connection was closed, or nothing is said, or nothing that JSON can say.
        """
        (length,) = _LENGTH.unpack(self._bytes(_LENGTH.size))
        if length > longest:
            raise OSError(f"a message of {length} bytes")
        try:
            return json.loads(self._bytes(length))
        except (ValueError, RecursionError) as error:
            raise OSError(f"a message that is no JSON: {error}") from None

    def send(self, data: memoryview) -> None:
        """Send bytes, of which the other side knows how many."""
        self._connection.sendall(data)

    def receive_into(self, data: memoryview) -> None:
        """Fill ``data`` with bytes that were sent."""
        done = 0
        while done < len(data):
            got = self._connection.recv_into(data[done:])
            if not got:
                raise OSError("the connection was closed")
            done += got

    def _bytes(self, count: int) -> bytes:
        room = bytearray(count)
        self.receive_into(memoryview(room))
        return bytes(room)


class SideChannel:
    """Answers the other ranks' questions in threads, and asks them.

    Args:
        name: of the channel, alike on all ranks and used once in a job.
        rank: this process' global rank.
        answer: called in a thread with a question and the line to the rank that asks; what it raises is told there.
        stranger: the same for who does not know the secret; by default such a one is told nothing.

    Example::

        channel = SideChannel("weights 3", dist.get_rank(), lambda question, line: line.say(question))
        with channel.ask(1, "Are you there?") as line:
            assert line.hear() == "Are you there?"
        channel.close()
    """

    def __init__(
        self,
        name: str,
        rank: int,
        answer: Callable[[Any, Line], None],
        stranger: Callable[[Any, Line], None] | None = None,
    ) -> None:
        self._name, self._answer, self._stranger = name, answer, stranger
        self._secret = secrets.token_hex(16)
        store, own = host_of_store()[0], address_towards(*host_of_store())
        # A name of this host may be its loopback address here, by which other hosts don't reach it.
        everywhere = is_loopback(own) and store not in _LOOPBACK
        self._server = socket.create_server(("" if everywhere else own, 0), backlog=128)
        self._known: dict[int, tuple[str, int, str]] = {}
        port = self._server.getsockname()[1]
        self.address: tuple[str, int, str] = store if everywhere else own, port, self._secret
        """By which others reach it: host, port and secret."""
        default_store().set(self._key(rank), json.dumps(self.address))
        self._threads = [threading.Thread(target=self._accept, name=f"lightning_par {name}", daemon=True)]
        self._threads[0].start()

    @contextlib.contextmanager
    def ask(self, rank: int, question: Any, patience: float = _SILENCE) -> Iterator[Line]:
        """A line to the global ``rank`` that has heard ``question``.

        Args:
            rank: whom to ask.
            question: what JSON can say.
            patience: seconds of silence until it is given up.

        Raises:
            RuntimeError: it does not answer, or could not.
        """
        try:
            with call(self.look_up(rank), question, patience) as line:
                yield line
        except ConnectionRefusedError as error:
            raise RuntimeError(f"Rank {rank} has left the run, or its process has ended ({error}).") from error
        except OSError as error:
            raise RuntimeError(f"Rank {rank} does not answer ({error}).") from error

    def close(self) -> None:
        """Answer no more, once what is under way was answered."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits
        self._server.close()
        while self._threads:
            self._threads.pop(0).join(_SILENCE)

    def _key(self, rank: int) -> str:
        return f"lightning_par/side channel/{self._name}/{rank}"

    def look_up(self, rank: int) -> tuple[str, int, str]:
        """Where the global ``rank`` listens, and its secret; waits for it at the first time.

        Raises:
            NotImplementedError: nobody listens in a dry run.
        """
        if rank not in self._known:
            if is_fake(dist.group.WORLD) and rank != dist.get_rank():
                raise NotImplementedError(f"Rank {rank} is asked for its weights, and in a dry run it is not there.")
            host, port, secret = json.loads(default_store().get(self._key(rank)))
            self._known[rank] = host, port, secret
        return self._known[rank]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # it was closed
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            thread.start()
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # who asked may have ended
            connection.settimeout(_INTRODUCTION)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = Line(connection)
            first = line.hear(_QUESTION)
            secret, question = first if isinstance(first, list) and len(first) == 2 else ("", None)
            knows = hmac.compare_digest(str(secret).encode(), self._secret.encode())
            answer = self._answer if knows else self._stranger
            if answer is None:
                return
            connection.settimeout(_SILENCE)
            try:
                answer(question, line)
            except OSError:
                raise
            except Exception as error:  # whatever it is, the rank that asks must hear of it
                line.say({"failure": f"{type(error).__name__}: {error}"})


@contextlib.contextmanager
def call(address: tuple[str, int, str], question: Any, patience: float) -> Iterator[Line]:
    """A line to what listens at ``address``, by its host, port and secret, that has heard ``question``.

    Args:
        patience: seconds for the connection, and for each answer to begin.

    Raises:
        OSError: nothing listens there, or does not answer.
    """
    host, port, secret = address
    with socket.create_connection((host, port), patience) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = Line(connection)
        line.say([secret, question])
        yield line
