"""What another thread of the process runs."""

from __future__ import annotations

import threading

from lightning_par.private.threads import frame_of, frames_of_all


def _waits(event: threading.Event, started: threading.Event) -> None:
    started.set()
    event.wait()


def test_the_frames_of_a_thread_are_those_of_its_functions() -> None:
    event, started = threading.Event(), threading.Event()
    thread = threading.Thread(target=_waits, args=(event, started))
    thread.start()
    started.wait()
    frame, names = frame_of(thread.ident or 0), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    assert "_waits" in names and thread.ident in frames_of_all()
    event.set()
    thread.join()
    assert frame_of(-1) is None
