"""Which code is the user's, and which line of an error's way."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_par.python_state.user_code import has_attributes, is_users_code, last_of, line_of, slots_of


def function(module: str, call: Callable[[], Any] | None = None) -> Callable[[], Any]:
    """One of the Python module ``module`` that makes a ``call``, or raises."""
    space: dict[str, Any] = {"__name__": module, "call": call}
    exec(compile("def run():\n    return call() if call else 1 / 0", f"{module}.py", "exec"), space)
    run: Callable[[], Any] = space["run"]
    return run


def raised(*modules: str) -> Exception:
    """What comes through functions of ``modules``, the outermost first."""
    run: Callable[[], Any] | None = None
    for module in reversed(modules):
        run = function(module, run)
    assert run is not None
    try:
        run()
    except ZeroDivisionError as error:
        return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    raise AssertionError


def test_it_is_the_last_that_is_no_librarys() -> None:
    error = raised("lightning.pytorch.loops", "mine", "torch.nn", "yours.inner", "lightning.pytorch.core", "torch._ops")
    assert line_of(error) == "yours.inner.py:2"
    assert line_of(raised("lightning.pytorch", "torch.optim.lbfgs", "lightning_par.optim")) is None


def test_what_is_wanted_counts_where_no_code_of_the_users_comes_behind_it() -> None:
    def steps(frame: types.FrameType) -> bool:
        return str(frame.f_globals["__name__"]).startswith("torch.optim")

    found = last_of(raised("lightning.pytorch", "torch.optim.lbfgs", "lightning_par.optim"), steps)
    assert found is not None and found.f_globals["__name__"] == "torch.optim.lbfgs"
    assert last_of(raised("torch.optim.lbfgs", "mine", "torch"), steps) is None


@pytest.mark.parametrize(
    ("folder", "noted", "users"),
    [
        ("project/src", "", True),
        ("project", "other", True),
        ("base/lib/python3/site-packages", "", False),
        ("usr/lib/python3/dist-packages", "", False),
        ("target", "{name}", False),
    ],
)
@pytest.mark.parametrize("kind", ["file", "package", "namespace"])
def test_code_in_folders_of_installers_is_not_the_users(
    folder: str, noted: str, users: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"code_of_{kind}_in_{folder.replace('/', '_').replace('-', '_').replace('.', '_')}"
    place = tmp_path / folder
    place.mkdir(parents=True)
    file = {"file": f"{name}.py", "package": f"{name}/__init__.py", "namespace": f"{name}/part.py"}[kind]
    (place / file).parent.mkdir(exist_ok=True)
    (place / file).touch()
    if noted:
        (place / "a-1.0.dist-info").mkdir()
        (place / "a-1.0.dist-info/RECORD").write_text(f"{file.replace(name, noted.format(name=name))},,\n")
    monkeypatch.syspath_prepend(place)
    importlib.import_module(f"{name}.part" if kind == "namespace" else name)
    assert is_users_code(f"{name}.part", frozenset()) is users
    assert is_users_code(f"{name}.part", frozenset({name}))


def test_what_a_context_puts_back_is_no_state_but_a_scalers_is() -> None:
    assert not has_attributes(torch.autocast("cpu", enabled=False))
    assert has_attributes(torch.amp.GradScaler("cpu"))


class Call(functools.partial):  # type: ignore[type-arg]
    __slots__ = ("count",)


def test_slots_are_those_that_can_be_written() -> None:
    assert list(slots_of(Call)) == ["count"]
