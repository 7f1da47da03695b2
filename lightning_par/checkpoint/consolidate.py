"""A directory becomes the single file that one device writes, as `lightning.pytorch.utilities.consolidate_checkpoint`
does it for Lightning's own directories::

    python -m lightning_par.checkpoint.consolidate last.ckpt --output_file one.ckpt
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from lightning_par.checkpoint import rename
from lightning_par.checkpoint.files import save
from lightning_par.checkpoint.outline import OWN
from lightning_par.checkpoint.reading import is_directory, load


def consolidate(folder: str | os.PathLike[str], file: str | os.PathLike[str], weights_only: bool | None = None) -> None:
    """Write what the directory ``folder`` holds to ``file``. One process does it, with memory for the largest tensor.

    Args:
        folder: that a strategy with ``save_distributed_checkpoint`` wrote, local or a URL.
        file: where to write, local; one that is there is replaced.
        weights_only: as for `torch.load`; hyperparameters of classes of your own need ``False``.

    Raises:
        FileNotFoundError: there is no ``folder``.
        ValueError: it is cut short, or was written by something else.
        pickle.UnpicklingError: it holds other things than ``weights_only`` allows.
        OSError: the disk is full: "No space left", with the sizes.

    Example::

        consolidate("last.ckpt", "one.ckpt")
        model = Model.load_from_checkpoint("one.ckpt")
    """
    if not is_directory(str(folder)):
        raise FileNotFoundError(f"There is no directory {folder}.")
    if os.path.abspath(file) == os.path.abspath(rename.left_behind(str(folder))):
        raise ValueError(f"{file} is the directory itself: name another file.")
    checkpoint = load(str(folder), weights_only)
    checkpoint.pop(OWN, None)  # a directory of weights alone has none
    save(checkpoint, os.fspath(file))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m lightning_par.checkpoint.consolidate", description=__doc__)
    parser.add_argument("checkpoint_folder", help="the directory that a strategy of lightning_par wrote")
    parser.add_argument("--output_file", help="where to write; <checkpoint_folder>.consolidated if it is not given")
    parser.add_argument("--no_weights_only", action="store_true", help="allow pickled classes, which may run code")
    given = parser.parse_args(arguments)
    file = given.output_file or f"{given.checkpoint_folder.rstrip('/')}.consolidated"
    consolidate(given.checkpoint_folder, file, False if given.no_weights_only else None)


if __name__ == "__main__":
    main()
