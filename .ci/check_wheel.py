"""Says what is in a wheel that should not be: ``python .ci/check_wheel.py dist/*.whl``."""

from __future__ import annotations

import sys
import zipfile

ALLOWED = ("lightning_par/", "lightning_par-")

if __name__ == "__main__":
    names = zipfile.ZipFile(sys.argv[1]).namelist()
    strays = [name for name in names if not name.startswith(ALLOWED)]
    missing = {"lightning_par/py.typed", "lightning_par/__init__.py"} - set(names)
    sys.exit(f"{sys.argv[1]}: strays {strays}, missing {sorted(missing)}" if strays or missing else 0)
