"""SIGTERM in the workers of a loader: their rank ends them by it, while a cluster sends it to all processes of a job.

torch's own handler there tells one from the other, too, but then ends the worker in both cases: in the second one its
rank, which is about to save and end, has an error instead of its next batch. A worker ends when its rank has ended.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from lightning_par.private.loaders import WORKERS_SET_HANDLERS
from lightning_par.sharded.patches.replacement import Replacement, Use


def patch() -> Replacement:
    """Of what each worker calls when it begins, which one that is forked has from its rank."""
    return Replacement(*WORKERS_SET_HANDLERS, _make)


def _make(plain: Callable[[], None], use: Use) -> Callable[[], None]:
    def set_handlers() -> None:
        plain()
        if use.on and hasattr(signal, "sigwaitinfo"):
            # Only who waits for a signal that is blocked learns who has sent it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_heed, args=(os.getppid(),), name="lightning_par signals", daemon=True).start()

    return set_handlers


def _heed(rank: int) -> None:
    while True:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == rank or os.getppid() != rank:
            os._exit(0)  # as torch's handler
