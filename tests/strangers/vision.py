"""Lets `import torchvision` succeed beside a torch without CUDA, where its own operators don't load.

PyPI's torchvision is built for a torch with CUDA. Beside another one it registers fake kernels of operators that are
not there, which ends the import, and torchmetrics' with it. None of the strangers calls such an operator.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

_REGISTERED = re.compile(r'^@torch\.library\.register_fake\(("torchvision::\w+")\)$', re.MULTILINE)
_WHERE_THERE = r"@(torch.library.register_fake(\1) if torchvision.extension._has_ops() else lambda fake: fake)"


def main() -> None:
    spec = find_spec("torchvision")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "_meta_registrations.py"
    file.write_text(_REGISTERED.sub(_WHERE_THERE, file.read_text()))


if __name__ == "__main__":
    main()
