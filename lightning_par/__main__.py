"""``python -m lightning_par check`` and ``plan``: see `lightning_par.verdict.command`."""

from __future__ import annotations

import sys

from lightning_par.verdict.command import main

if __name__ == "__main__":
    sys.exit(main())
