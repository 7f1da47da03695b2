"""Where this process waits for other ranks, in one function, so that a look at its stack shows that it does."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_par.mesh.progress import Progress


def wait_for(work: dist.Work, about: Any = None) -> None:
    """`torch.distributed.Work.wait`.

    Args:
        work: what was begun.
        about: what it is, for who looks at the stack: something that `str` tells.

    Raises:
        RuntimeError: it can't end, or has not in time.
    """
    recorder = Progress.current.recorder
    if recorder is None:
        work.wait()
    else:
        recorder.wait(work)
