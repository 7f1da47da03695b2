"""The command of the verdict: ``python -m lightning_par check my_module.py:MyModule ...``."""

from __future__ import annotations

import difflib
import json
import sys
from argparse import BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

EQUAL, DIFFERS, REFUSED = 0, 1, 2

_EXAMPLE = """example:
  python -m lightning_par check my_module.py:MyModule --batch my_module.py:make_batch \\
      --layout tensor_parallel --layout '{"sequence_parallel_size": 2}' --init '{"width": 64}'

exit code: 0 where all layouts equal one device, 1 where one differs, 2 where one is refused or an argument is wrong"""


def add_check(commands: Any) -> None:
    """Add the command to the ``commands`` of a parser."""
    check = commands.add_parser(
        "check",
        help="train a few steps on one device and under layouts, and compare",
        epilog=_EXAMPLE,
        formatter_class=RawDescriptionHelpFormatter,
    )
    check.add_argument("module", help="a LightningModule's class, or a function: FILE.py:NAME or PACKAGE.MODULE:NAME")
    check.add_argument(
        "--batch", required=True, help="a batch or a DataLoader, or a function that makes one: as MODULE"
    )
    check.add_argument(
        "--layout",
        action="append",
        required=True,
        help="a strategy's name, or a dict of sizes in JSON; may be repeated",
    )
    check.add_argument("--init", type=json_dict, default={}, help="keyword arguments of MODULE, a dict in JSON")
    check.add_argument("--devices", type=int, help="processes under each layout (default: what its sizes say)")
    check.add_argument("--steps", type=int, default=2, help="optimizer steps (default: 2)")
    check.add_argument("--gradient-clip-val", type=float, default=0.05, help="the Trainer's (default: 0.05)")
    check.add_argument(
        "--dropout", action=BooleanOptionalAction, default=False, help="leave dropout on, with one device's masks"
    )
    check.add_argument("--timeout", type=float, default=600.0, help="seconds for each run (default: 600)")
    check.set_defaults(run=_check)


def _check(asked: Namespace) -> int:
    layouts = [json_dict(text) if text.lstrip().startswith("{") else text for text in asked.layout]
    module, batch = load(asked.module), load(asked.batch)
    # Only now, so that wrong arguments are told without waiting for torch.
    from lightning_par.verdict import draws_of, read_job, read_layouts
    from lightning_par.verdict.judge import judge

    if asked.init:
        module = partial(module, **asked.init)
    batch = batch() if callable(batch) else batch
    job = read_job(module, batch, asked.steps, asked.gradient_clip_val, asked.dropout, asked.devices)
    # nothing ran here yet
    verdict = judge(job, read_layouts(layouts, asked.devices, job.namespace, draws_of(job)), asked.timeout)
    verdict.show()
    states = {one.state for one in verdict.layouts}
    return DIFFERS if "differs" in states else REFUSED if "refused" in states else EQUAL


def load(target: str) -> Any:
    """What ``FILE.py:NAME`` or ``PACKAGE.MODULE:NAME`` names; the file's folder can be imported from, as in a script.

    Raises:
        ValueError: there is no such file or name.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ValueError(f"{target!r} names nothing: write FILE.py:NAME or PACKAGE.MODULE:NAME.")
    home = _load_file(Path(place)) if place.endswith(".py") else import_module(place)
    if not hasattr(home, name):
        near = difflib.get_close_matches(name, vars(home), n=1, cutoff=0.6)
        raise ValueError(f"{place} has no {name!r}{f'; it has {near[0]!r}' if near else ''}.")
    return getattr(home, name)


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    sys.path.insert(0, str(path.parent))
    name = path.stem if known is None else f"_checked_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def json_dict(text: str) -> dict[str, Any]:
    """The dict that ``text`` is in JSON.

    Raises:
        ValueError: it is none.

    Example::

        assert json_dict('{"width": 64}') == {"width": 64}
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is no dict.")
    return value
