"""No file outside ``lightning_par/private`` imports a private name of Lightning or torch."""

from __future__ import annotations

import ast
from pathlib import Path

import lightning_par

ROOT = Path(lightning_par.__file__).parent
SOURCES = [path for path in sorted(ROOT.rglob("*.py")) if (ROOT / "private") not in path.parents]
# Used by more than one file, under torch's own names: fake tensors and pytrees have no public home.
SHARED = {"_pytree", "_subclasses"}


def _private_imports(source: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module.split(".")[0] in ("torch", "lightning", "pytorch_lightning", "lightning_fabric"):
                parts = [*node.module.split("."), *(name.name for name in node.names)]
                found += [f"{source.name}: {p}" for p in parts if p.startswith("_") and p not in SHARED]
    return found


def test_no_other_file_imports_a_private_name() -> None:
    assert [name for source in SOURCES for name in _private_imports(source)] == []
