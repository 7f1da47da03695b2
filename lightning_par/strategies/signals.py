"""Signals of the operating system: noted in a thread as they come, whatever the main thread does or waits for.

Python runs a handler once the main thread is back in Python, which may be long after: it waits in a collective. But as
a signal comes, Python writes its number to a file (`signal.set_wakeup_fd`), from which a thread reads here. Nothing is
done within a handler but that, and calling the user's own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

_HANDLED = 0x80  # in a byte that a handler wrote: the rest is the signal's number
_WOKEN = b"\0"  # no signal's number


class Signals:
    """Tells of signals in a thread of its own, from `start` to `close`.

    Args:
        react: called in the thread with a signal's number, each time it comes.
        expire: called in the thread once the time that `expire_at` was given has come.

    Example::

        signals = Signals(react=print, expire=lambda: os._exit(1))
        signals.start()
        signals.install([signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)  # prints 15
        signals.close()
    """

    installed: list[Signals] = []
    """In this process, in the order in which they came."""

    def __init__(self, react: Callable[[int], None], expire: Callable[[], None]) -> None:
        self._react, self._expire = react, expire
        self._before: dict[int, Any] = {}  # handlers that were there
        self._receive, self._send = socket.socketpair()
        self._receive.setblocking(False)
        self._send.setblocking(False)
        self._wakeup_before: int | None = None  # the file that Python wrote to before; -1 for none
        self._deadline: float | None = None
        self._raised: Counter[int] = Counter()
        self._handled: Counter[int] = Counter()
        self._seen: Counter[int] = Counter()
        self._pid = os.getpid()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="lightning_par signals", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def install(self, numbers: Iterable[int]) -> None:
        """Handle these signals from now on, those of an earlier call as well, before which others may have been set.

        A handler of Python's own for Ctrl-C is replaced; a user's is called, too. Outside of the main thread nothing
        is installed: Python doesn't let it.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in {*numbers, *self._before}:
            handler = handler_of(number)
            if handler != self._handle:
                self._before[number] = handler
                signal.signal(number, self._handle)
        if self._wakeup_before is None:
            self._wakeup_before = signal.set_wakeup_fd(self._send.fileno(), warn_on_full_buffer=False)
            self.installed.append(self)

    @property
    def handlers_before(self) -> dict[int, Any]:
        """The handlers in whose place these are, by signal."""
        return dict(self._before)

    @property
    def is_of_other_process(self) -> bool:
        """Whether this process was forked off the one that these are of."""
        return os.getpid() != self._pid

    def expire_at(self, when: float) -> None:
        """Call ``expire`` at that time of `time.monotonic`, and not at one that was said before."""
        self._deadline = when
        self._tell(_WOKEN)

    def close(self) -> None:
        """Put back the handlers that were there, but those that were set since, and end the thread."""
        if self in self.installed:
            self.installed.remove(self)
            if threading.current_thread() is threading.main_thread():
                self._uninstall()
        self._closed = True
        self._tell(_WOKEN)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(10.0)
        self._send.close()
        self._receive.close()

    def _uninstall(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        assert self._wakeup_before is not None
        now = signal.set_wakeup_fd(self._wakeup_before)
        if now != self._send.fileno():  # somebody has taken it since
            signal.set_wakeup_fd(now)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if self.is_of_other_process:
            self._handle_in_fork(number, before)
            return
        self._tell(bytes([_HANDLED | number]))
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _handle_in_fork(self, number: int, before: Any) -> None:
        """A fork has the handler, too. What a cluster sends to all processes of a job would end the workers of a
        loader, and by that the step that waits for them; they end with their rank."""
        self._seen[number] += 1
        if get_worker_info() is not None and self._seen[number] == 1:
            return
        signal.signal(number, signal.SIG_DFL if before is None else before)
        os.kill(os.getpid(), number)

    def leave_fork(self) -> None:
        """Called in a fork of the process: Python there must not write to the file of this one."""
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        self._seen.clear()

    def _tell(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # full: the thread is about to read; or closed
            self._send.send(what)

    def _watch(self) -> None:
        while not self._closed:
            deadline = self._deadline
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._receive], [], [], left)
            if ready:
                self._read()
            elif deadline is not None and time.monotonic() >= deadline:
                self._deadline = None
                self._expire()

    def _read(self) -> None:
        for byte in self._receive.recv(4096):
            number = byte & ~_HANDLED
            if byte & _HANDLED:
                self._handled[number] += 1
            elif number:
                self._pass_on(byte)
                if signal.getsignal(number) != self._handle:
                    continue
                self._raised[number] += 1
            # Each signal is told twice, and by Python's handlers alone where others have taken the file.
            while self._seen[number] < max(self._raised[number], self._handled[number]):
                self._seen[number] += 1
                self._react(number)

    def _pass_on(self, byte: int) -> None:
        if self._wakeup_before not in (None, -1):
            with contextlib.suppress(OSError):
                os.write(self._wakeup_before, bytes([byte]))  # type: ignore[arg-type]


def handler_of(number: int) -> Any:
    """The handler of a signal, as `signal.getsignal` gives it; not one that is of the process which forked this one."""
    handler = signal.getsignal(number)
    while isinstance(owner := getattr(handler, "__self__", None), Signals) and owner.is_of_other_process:
        handler = owner.handlers_before.get(number)
    return handler


_masks = threading.local()  # of a thread that forks: the signals that it blocked before


def _block_signals() -> None:
    """Until a fork has left this process's file, a signal to it would count as one to this process, and be lost to it:
    Python forgets there what came before."""
    numbers = {number for signals in Signals.installed for number in signals.handlers_before}
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers) if numbers else None


def _unblock_signals() -> None:
    before, _masks.before = getattr(_masks, "before", None), None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_forks() -> None:
    for signals in Signals.installed:
        signals.leave_fork()
    Signals.installed.clear()
    _unblock_signals()


os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_leave_forks)
