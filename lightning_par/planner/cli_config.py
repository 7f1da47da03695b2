"""What a LightningCLI's YAML says of a run: its model, its precision, its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunConfig:
    """Of one run; None where the YAML does not say it."""

    module: Callable[[], Any] | None
    precision: str | None
    devices: int | None


def read_config(path: str) -> RunConfig:
    """Read the YAML at ``path``.

    Raises:
        ValueError: there is no such file, or its model can't be found.
    """
    import yaml

    file = Path(path)
    if not file.is_file():
        raise ValueError(f"There is no file {path}.")
    given: Mapping[str, Any] = yaml.safe_load(file.read_text()) or {}
    given = given.get("fit", given)
    trainer = given.get("trainer") or {}
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes", 1)
    count = devices * nodes if isinstance(devices, int) and isinstance(nodes, int) else None
    precision = trainer.get("precision")
    return RunConfig(_module(given.get("model"), path), None if precision is None else str(precision), count)


def _module(model: Any, path: str) -> Callable[[], Any] | None:
    if not isinstance(model, Mapping) or "class_path" not in model:
        return None
    place, _, name = str(model["class_path"]).rpartition(".")
    try:
        kind = getattr(import_module(place), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: the model {model['class_path']!r} can't be imported: {error}.") from None
    return partial(kind, **(model.get("init_args") or {}))
