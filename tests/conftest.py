"""What all processes of a test run have in common; fixtures are in `tests.helpers.fixtures`."""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

import pytest

from tests.helpers.longest import FilesOfAKind, longest_first

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the ranks of a test share few cores
# torch's store asks for the name of each client's address, and waits 5 s where a name server drops that question.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

pytest_plugins = ["pytester", "tests.helpers.slow", "tests.gpu_rules.plugin"]


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # until all is imported and collected, which stays
        config.pluginmanager.import_plugin("tests.helpers.fixtures")  # who only hands out tests needs no torch


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Who hands out tests shows it, and would import what its class is from: Lightning, and all that this imports."""
    kind = type(warning_message.message)
    if kind.__module__ != "builtins":
        warning_message.message = Warning(f"{kind.__module__}.{kind.__name__}: {warning_message.message}")
        warning_message.category = Warning


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return FilesOfAKind(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """What is there by now stays: looking it through again and again takes minutes in all."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items)
