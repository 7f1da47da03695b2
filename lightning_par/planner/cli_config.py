"""What a LightningCLI's YAML says of a run: its model, optimizer and data, its precision, its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any


@dataclass(frozen=True)
class RunConfig:
    """Of one run; None where the YAML does not say it.

    Attributes:
        module: makes the model, with the optimizer that the YAML gives it.
        data: makes the datamodule.
        precision: the Trainer's.
        devices: of all hosts.
        accumulated: batches of one step of the optimizer on each replica.
        clip: the Trainer's ``gradient_clip_val``.
        clip_algorithm: its ``gradient_clip_algorithm``.
    """

    module: Callable[[], Any] | None
    data: Callable[[], Any] | None
    precision: str | None
    devices: int | None
    accumulated: int | None = None
    clip: float | None = None
    clip_algorithm: str | None = None


def read_config(path: str, kind: Any = None, data_kind: Any = None) -> RunConfig:
    """Read the YAML at ``path``. Nothing is made yet.

    Args:
        path: of what LightningCLI takes with ``--config``, or writes into a run's folder.
        kind: the model's class, or a function that makes it, where the YAML says no more than its arguments.
        data_kind: the datamodule's class, likewise.

    Raises:
        ValueError: there is no such file, it is none of LightningCLI's, or a class in it can't be found or does not
            take what is given.
    """
    import yaml

    file = Path(path)
    if not file.is_file():
        raise ValueError(f"There is no file {path}.")
    try:
        given = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(given, Mapping):
        raise ValueError(f"{path} is no config of LightningCLI: it has no names such as model and trainer.")
    given = given.get("fit") or given
    trainer = given.get("trainer") or {}
    precision = trainer.get("precision")
    accumulated = trainer.get("accumulate_grad_batches")
    data = _maker(given.get("data") or {}, data_kind, "data", path, kind or data_kind)
    return RunConfig(
        _module(given, kind, path), data, None if precision is None else str(precision),
        _devices(trainer.get("devices"), trainer.get("num_nodes", 1)),
        accumulated if isinstance(accumulated, int) and accumulated > 0 else None,
        trainer.get("gradient_clip_val"), trainer.get("gradient_clip_algorithm"),
    )  # fmt: skip


def _devices(devices: Any, nodes: Any) -> int | None:
    count = len(devices) if isinstance(devices, list) else devices
    count = int(count) if isinstance(count, str) and count.isdigit() else count
    whole = isinstance(count, int) and isinstance(nodes, int) and count > 0  # -1 is as many as there are
    return count * nodes if whole else None


def _module(given: Mapping[str, Any], kind: Any, path: str) -> Callable[[], Any] | None:
    model = given.get("model") or {}
    make = _maker(model, kind, "model", path, kind)
    optimizer = given.get("optimizer")
    if make is None or not optimizer:
        return make
    name = optimizer.get("class_path") if isinstance(optimizer, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            f"{path}: optimizer has no class_path, as where a LightningCLI's own code names its class. Write it there, "
            "with what is there now below init_args: optimizer: {class_path: torch.optim.AdamW, init_args: {...}}."
        )
    optimizer_kind, arguments = _named(name, "optimizer", path, kind), dict(optimizer.get("init_args") or {})

    def with_optimizer() -> Any:
        module = make()
        configure = MethodType(lambda self: optimizer_kind(self.parameters(), **arguments), module)
        module.configure_optimizers = configure  # as LightningCLI does
        return module

    return with_optimizer


def _maker(given: Any, kind: Any, section: str, path: str, of_script: Any) -> Callable[[], Any] | None:
    """Makes what a section of the YAML describes; None where that is no more than arguments, and no ``kind`` is there.

    ``of_script`` is whatever is known of the script that ran.

    Raises:
        ValueError: it can't be found, or does not take what is given.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}: {section} must have a class_path and init_args, got {given!r}.")
    if "class_path" in given:
        kind = kind or _named(str(given["class_path"]), section, path, of_script)
        given = given.get("init_args") or {}
    if kind is None:
        return None
    try:
        from jsonargparse import ArgumentParser
    except ImportError:
        raise ValueError("--config needs jsonargparse: pip install 'lightning_par[cli]'.") from None
    parser = ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if isinstance(kind, type) else parser.add_function_arguments
    if not add(kind, section, fail_untyped=False):  # it takes none by name
        return partial(kind, **given)
    try:
        read = parser.parse_object({section: dict(given)})
    except Exception as error:  # of its own kind, or what types of the user's raise
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None

    def make() -> Any:
        made = getattr(parser, "instantiate", None) or parser.instantiate_classes  # newer, older
        found = made(read)[section]
        return found if isinstance(kind, type) else kind(**found.as_dict())

    return make


def _named(name: str, section: str, path: str, of_script: Any) -> Any:
    """The class of that name; one of ``__main__`` is where ``of_script`` is from.

    Raises:
        ValueError: there is none.
    """
    place, _, own = name.rpartition(".")
    if place == "__main__":
        if of_script is None:
            raise ValueError(
                f"{path}: the {section} {name!r} is of the script that was run, which the YAML does not name. Give "
                f"it with the command: plan SCRIPT.py:{own if section == 'model' else 'MODEL'} --config {path}."
            )
        place = of_script.__module__
    try:
        return getattr(import_module(place), own)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: the {section} {name!r} can't be imported: {error}.") from None
