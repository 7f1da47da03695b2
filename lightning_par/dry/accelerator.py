"""The devices of a dry run, of which none need be there."""

from __future__ import annotations

from typing import Any, Literal

import torch

from lightning_par.strategies.namespace import Namespace

Kind = Literal["cpu", "gpu"]
"""As a Trainer's ``accelerator``."""


def refuse_without_gpu() -> None:
    """
    Raises:
        ValueError: there is none. Tensors without values need none, but a backward through them asks for its streams:
            torch 2.13 to 2.15 raise then, and a build for the CPU alone ends the process.
    """
    if not torch.cuda.is_available():
        why = "no GPU is found" if torch.backends.cuda.is_built() else "this build is for the CPU alone"
        raise ValueError(
            f"accelerator='gpu' needs one GPU, of which little is used (torch {torch.__version__}: {why}; torch can't "
            "run a backward on tensors of a GPU without one, though they have no values). Start it on a machine with a "
            "GPU and a build of torch for it (https://pytorch.org/get-started), or leave out accelerator='gpu' "
            "(`--accelerator gpu`): then tensors are those of a CPU."
        )


def make_accelerator(namespace: Namespace, kind: Kind) -> Any:
    """Lightning's accelerator for devices of ``kind``, as many as are asked for, whatever this machine has.

    Args:
        namespace: whose Lightning it is for.
        kind: of device.
    """
    if kind == "cpu":
        return "cpu"
    base = namespace.from_pytorch("accelerators", "Accelerator")
    answers: dict[str, Any] = {
        "setup_device": lambda self, device: None,
        "teardown": lambda self: None,
        "get_device_stats": lambda self, device: {},
        "parse_devices": staticmethod(lambda devices: [*range(devices)]),
        "get_parallel_devices": staticmethod(lambda devices: [_device(i) for i in devices]),
        "auto_device_count": staticmethod(lambda: 1),
        "is_available": staticmethod(lambda: True),
        "name": staticmethod(lambda: "cuda"),
    }
    return type("DryAccelerator", (base,), answers)()


def _device(index: int) -> torch.device:
    """The GPU number ``index``; the first one stands for those that this machine lacks."""
    return torch.device("cuda", index if index < torch.cuda.device_count() else 0)
