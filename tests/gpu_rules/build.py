"""The extension that `fakecuda.cpp` is built to, once for each source, torch and Python, in a folder of the user's.

It must be loaded before torch, which looks once, while it is imported, for what CUDA there is: so torch is not imported
here.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

NAME = "fakecuda_extension"
SOURCE = Path(__file__).with_name("fakecuda.cpp")
_loaded: list[Any] = []


class NoFakeDeviceError(RuntimeError):
    """The fake device can't be had here; the message says why."""


def missing() -> str | None:
    """Why the fake device can't be had, in words; None where it is built or can be."""
    if _torch()["cuda"] or _torch()["hip"]:
        return "the fake device takes the place of CUDA in a CPU build of torch, and this build has CUDA"
    if not _file().exists() and shutil.which("g++") is None:
        return "the fake device is built by g++, which is not there"
    if not _file().exists() and not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the fake device is built with Python's headers (Python.h), which are not there"
    return None


def extension() -> Any:
    """The module, built (half a minute) if it is not there yet.

    Raises:
        NoFakeDeviceError: it can't be built.
    """
    if not _loaded:
        why = missing()
        if why:
            raise NoFakeDeviceError(why)
        if "torch" in sys.modules:
            raise NoFakeDeviceError("the fake device must be installed before torch is imported")
        spec = importlib.util.spec_from_file_location(NAME, _built())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _loaded.append(module)
    return _loaded[0]


def _folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _torch() -> dict[str, Any]:
    """What ``torch.version`` holds."""
    found: dict[str, Any] = {}
    exec((_folder() / "version.py").read_text(), found)
    return found


def _file() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_par_tests"
    key = hashlib.sha256(SOURCE.read_bytes())
    # with the folder whose libraries it looks for: another environment's may be gone
    key.update(f"{_torch()['__version__']} {_folder()} {sys.version} {sysconfig.get_config_var('EXT_SUFFIX')}".encode())
    return cache / f"fakecuda-{key.hexdigest()[:16]}.so"


def _built() -> Path:
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who comes second finds it built
        if not file.exists():
            _build(file)
    return file


def _errors(told: str) -> str:
    return "\n".join(line for line in told.splitlines() if "error" in line)[:2000]


def _build(file: Path) -> None:
    include, library = _folder() / "include", _folder() / "lib"
    folders = include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"]
    unfinished = file.with_suffix(f".{os.getpid()}")
    command = [
        *("g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w", f"-DTORCH_EXTENSION_NAME={NAME}"),
        *(f"-I{folder}" for folder in folders),
        *(str(SOURCE), "-o", str(unfinished), f"-L{library}", f"-Wl,-rpath,{library}"),
        *("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoFakeDeviceError(f"g++ could not build {SOURCE.name}: {_errors(done.stderr)}")
    unfinished.rename(file)
