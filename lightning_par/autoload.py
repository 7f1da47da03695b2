"""What ``import torch`` calls in every process where this package is installed (entry point ``torch.backends``).

Torch means the group for device backends. It is the one hook that runs before a Trainer looks up its strategy's name,
so it is used here to make the names known. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns it off; ``import lightning_par``
does the same work.
"""

from __future__ import annotations


def register() -> None:
    """Make the strategy names known to Lightning, now or when it is imported. Never raises: torch would not import."""
    try:
        from lightning_par.strategies import registry

        registry.install()
    except Exception:
        pass
