"""The checkpoint files of this package for a plain Trainer; see `lightning_par.checkpoint.files`."""

from lightning_par.checkpoint.files import make_checkpoint_io

__all__ = ["make_checkpoint_io"]
