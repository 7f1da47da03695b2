"""Ranks under the strict group, on fake CUDA devices or on CPU, with a report of each."""

from __future__ import annotations

import importlib
import io
import os
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch

from tests.gpu_rules import report
from tests.gpu_rules.orders import opposite_orders
from tests.gpu_rules.report import Report, Rules
from tests.helpers.pool import Pool, RanksFailedError

Device = Literal["cuda", "cpu", "shared"]


class StrictPool(Pool):
    """A pool whose ranks have the strict group, and on "cuda" fake devices.

    Attributes:
        rules: of the next runs.
        reports: of the last run that succeeded, by rank.

    Example::

        pool = StrictPool("cuda")
        pool.rules = Rules(queue="rank")
        pool.run(2, train)
        assert pool.broken() == []
    """

    def __init__(self, device: Device = "cuda", rules: Rules | None = None) -> None:
        # What stands in for a GPU must be there before torch is; the group for a CPU comes with the first job.
        super().__init__(*[("tests.gpu_rules.template", device)] * (device != "cpu"))
        self.device = device
        self.rules = rules or Rules()
        self.reports: list[Report] = []
        self._broken: list[str] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        own = {name: kwargs.pop(name) for name in ("timeout", "grace", "until") if name in kwargs}
        job = self.device, function.__module__, function.__qualname__, args, kwargs
        try:
            answers = super().run(world_size, _under, self.rules, *job, **own)
        except RanksFailedError:
            self.restart()  # what hangs in a queue would hang in the next run
            raise
        self.reports = [made for _, made in answers]
        self._broken += self.broken()
        return [pickle.loads(result) for result, _ in answers]

    def broken(self) -> list[str]:
        """The violations of the last run, and the opposite orders, one line each."""
        orders = [f"{count} x in opposite orders: {' and '.join(pair)}" for pair, count in self.opposite().items()]
        return [line for each in self.reports for line in each.lines()] + orders

    def broken_since(self) -> list[str]:
        """Those of all runs since the last call."""
        broken, self._broken = self._broken, []
        return broken

    def opposite(self) -> Counter[tuple[str, str]]:
        return opposite_orders(self.reports)


class _ToHost(pickle.Pickler):
    """Who asked has no fake device: tensors come to it on the CPU."""

    def reducer_override(self, x: Any) -> Any:
        if type(x) is not torch.Tensor or not x.is_cuda:
            return NotImplemented
        return x.detach().cpu().requires_grad_(x.requires_grad).__reduce_ex__(2)


def _on_host(result: Any) -> bytes:
    file = io.BytesIO()
    _ToHost(file).dump(result)
    return file.getvalue()


def _under(
    rules: Rules, device: Device, module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bytes, Report]:
    """A job of `StrictPool`, on a rank."""
    if device == "cpu":
        importlib.import_module("tests.gpu_rules.cpu")
    rules.to_environment()
    torch.cuda.is_available() and (torch.cuda.set_device(0), torch.cuda.manual_seed_all(0))
    made = report.begin()
    made.rank = int(os.environ["RANK"])
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    try:
        return _on_host(function(*args, **kwargs)), made
    except BaseException as error:
        if not made.violations:
            raise
        raise RuntimeError("\n".join(["rules were broken:", *made.lines()])) from error
