"""The survey of a step that is recorded for other parts: it need not run once more for the pipeline."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_par.pipeline.program.event_functions import WITHOUT_ANOTHER, is_metadata, is_setting
from lightning_par.pipeline.program.norm_statistics import statistics_of
from lightning_par.pipeline.trial.analysis_copy import trace_calls
from lightning_par.pipeline.trial.call_costs import CallTree
from lightning_par.pipeline.trial.result_sizes import sizing
from lightning_par.pipeline.trial.survey import Seen, Survey, calls_in
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.functions import READS
from lightning_par.sharded.rules.lookup import user_line


class Surveyor(CallTree):
    """A `Listener` that makes a `Survey`, as a run of the step would that is made for it alone.

    Args:
        samples: of the batch.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._samples = samples
        self._seen: list[Seen] = []
        self._differs = False

    def begin(self, copy: nn.Module) -> None:
        self.buffers = {id(b): name for name, b in copy.named_buffers()}
        trace_calls(copy, self)

    def number(self) -> int:
        return len(self._seen)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, of_model: bool, unsized: bool = False) -> None:
        name = getattr(func, "__name__", "")
        if is_metadata(func, name):
            return
        if name == "grad" and (getattr(func, "__module__", "") or "").startswith("torch.autograd"):
            self._differs = True  # which the pipeline's own run does not take as an event
        self._differs |= any(id(x) not in self.buffers for x in statistics_of(func, args, kwargs))  # or as several
        if name in WITHOUT_ANOTHER and len(args) == 2 and isinstance(args[1], Tensor):
            func, args, more = WITHOUT_ANOTHER[name](*args)
            kwargs = {**more, **kwargs}
        place = user_line()
        if not of_model:
            if not is_setting((args, kwargs), result):
                self._seen.append(Seen(func, place, tuple(tuple(x.shape) for x in tensors_in(result))))
            return
        if name in READS:
            self.close_modules(f"it reads a value at {place}", reads=True)
        elif not isinstance(func, tuple):  # the call of a metric
            if unsized and sizing(func, args) is None:
                self.close_modules("the shape of a value in it depends on values")
            self.charge(func, args, kwargs, result)
        self._seen.append(Seen(func, place))

    def note_within(self, args: Any, kwargs: Any, result: Any, of_model: bool) -> None:
        pass  # what it costs is the whole's

    def end(self) -> Survey | None:
        """The survey; None where a run of its own would tell more."""
        root = self.frames[0]
        if self._differs:
            return None
        return Survey(root.call(self.calls), self._samples, tuple(self._seen), tuple(calls_in(root)))
