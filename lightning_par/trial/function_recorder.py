"""The mode that notes the torch functions of a trial run.

What depends on the batch and the module's state alone is computed, unless a plan does without what is large of it;
parameters, and what comes of them, are fake. Events hold fakes alone, so that no value of the batch lives longer than
in the user's own run.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_par.private.fake_tensors import FakeTensorMode
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.tensors import mark_parameter
from lightning_par.private.transforms import in_functorch, is_wrapped
from lightning_par.python_state.drawing_caches import drew_for_cache
from lightning_par.python_state.nested_tensors import cloned
from lightning_par.sharded.functions import DRAWS, DRAWS_ANEW, READS, VALUE_PROPERTIES, name_of, writes_into
from lightning_par.sharded.rules.attention_heads import multi_head_attention_forward
from lightning_par.sharded.rules.lookup import user_line, writes
from lightning_par.sharded.wrapped_tensors import run_by_wrapper
from lightning_par.trial.applied_functions import Applied
from lightning_par.trial.fake_functions import OnOnes, is_fake, is_sharded, run_on_fakes
from lightning_par.trial.guesses import Guesses
from lightning_par.trial.large_values import LargeAsFakes, is_large, note_made
from lightning_par.trial.listener import Listener
from lightning_par.trial.mask_shares import MaskShares
from lightning_par.trial.recording import End, Event, in_transform, metric_update


class Recorder(TorchFunctionMode):
    """Notes every torch function.

    Args:
        mode: of the fakes.
        guesses: what the user's code is told of values that are not there.
        listener: is told of the functions, too.

    Attributes:
        events: the functions so far.
        drew_for_cache: whether a function under `functools.lru_cache` drew.
        ends: values that the step runs backward from itself, of a plan.
        calls: of the user's autograd functions, of a plan.
        hollow: whether large values of the batch are fake.
        by_hand: the weights of a plan's step that runs backward itself.
    """

    hollow = False
    by_hand: Sequence[Tensor] = ()

    def __init__(self, mode: FakeTensorMode, guesses: Guesses, listener: Listener | None = None) -> None:
        super().__init__()
        self.mode, self.guesses, self.listener = mode, guesses, listener
        self.events: list[Event] = []
        self.ends: list[End] = []
        self.calls: list[Applied] = []
        self.drew_for_cache = False  # for a function's that later calls find filled
        self.within = 0  # how many functions are being written out, of which the listener hears as a whole
        self._shares = MaskShares()
        self._fakes: dict[int, tuple[Callable[[], Tensor | None], Tensor]] = {}  # of real tensors, by id
        self._written: dict[int, Any] = {}  # real memory that fakes were written into: it has no values any more

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (result := run_by_wrapper(self, func, types, args, kwargs)) is not NotImplemented:
            return result
        name = name_of(func)
        if getattr(func, "__name__", "") == "__get__" and name not in VALUE_PROPERTIES:
            return func(*args, **kwargs)
        if name == "multi_head_attention_forward":
            out = self.written_out(func, args, kwargs)
            if out is not NotImplemented:
                return out
        return self.noted(func, name, args, kwargs)

    def written_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`torch.nn.functional.multi_head_attention_forward` as it will run on sharded tensors."""
        self.within += 1
        try:
            with self:
                out = multi_head_attention_forward(func, *args, **kwargs)
        finally:
            self.within -= 1
        if out is not NotImplemented:
            self.tell(func, args, kwargs, out)
        return out

    def noted(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The result of a function, which is an event."""
        if self._written:
            args, kwargs = tree_map(self.followed, (args, kwargs))
        fakes = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and is_fake(x)]
        if fakes and name == "backward" and self.by_hand:
            return self.begin_backward(*args, **kwargs)
        self.guesses.ran(fakes)
        if fakes and name in READS:
            self.keep_read(func, args, kwargs)
            return self.guesses.read(name, fakes[0], args)
        if name == "__deepcopy__" and is_fake(args[0]):
            return _copied(*args)
        given = args, kwargs
        result, ran = self._run(func, name, args, kwargs) if fakes else (self._computed(func, name, args, kwargs), func)
        if self.hollow and (not fakes or all(map(is_large, fakes)) or writes(name)):
            note_made((result, args[:1] if writes(name) else ()), (args, kwargs))
        self.tell(func, *given, result, unsized=isinstance(ran, OnOnes) and ran.unsized)
        func = ran
        if in_functorch():  # its own tensors are none outside
            taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not is_wrapped(x)]
            self.took_by(in_transform, taken)
        else:
            self.keep(func, args, kwargs, result)
        return result

    def _computed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The result of a function that takes no fakes."""
        with LargeAsFakes(self.mode) if self.hollow else contextlib.nullcontext():
            if name not in DRAWS and name not in DRAWS_ANEW:
                return func(*args, **kwargs)
            result, cache = drew_for_cache(lambda: func(*args, **kwargs))
            self.drew_for_cache |= cache is not None
            return result

    def keep_read(self, func: Any, args: Any, kwargs: Any) -> None:
        """``func`` reads a value of the model."""
        self.tell(func, args, kwargs, None)
        self.keep(func, args, kwargs, None)

    def begin_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The step runs backward itself; a plan goes on without gradients."""
        trained = frozenset(id(x) for x in self.by_hand if x.requires_grad)
        self.ends.append(End(loss, len(self.events), trained))

    def applied(self, function: Any, call: Any, args: tuple[Any, ...]) -> Any:
        """The result of ``call``, by which an autograd function of the user's is applied to ``args``."""
        first, place, graph = len(self.events), user_line(), torch.is_grad_enabled()
        given = tree_map(self.fake, args)
        result = call(*args)
        made = tree_map(self.fake, result)
        self.calls.append(Applied(function, given, made, first, len(self.events), graph, place))
        return result

    def took(self, method: str, *args: Any, **kwargs: Any) -> None:
        """A call of a metric's ``method``: it is handed whole tensors."""
        self.tell(("metric", method), args, kwargs, None)
        self.keep(metric_update, args, kwargs, None)

    def took_by(self, func: Any, value: Any) -> None:
        """``func``, which has no rule, is handed ``value``."""
        self.keep(func, (value,), {}, None)

    def fake(self, x: Any) -> Any:
        """The fake that stands for a real tensor in the events; anything else itself."""
        if not isinstance(x, Tensor) or is_fake(x) or is_sharded(x):
            return x
        known, fake = self._fakes.get(id(x), (lambda: None, x))
        if known() is not x:  # an id may be another's by now
            fake = x
            with contextlib.suppress(Exception):  # of a kind that can't be faked
                fake = self.mode.from_tensor(x)
            self._fakes[id(x)] = weakref.ref(x), fake
        elif x.is_leaf and fake.is_leaf and fake.requires_grad is not x.requires_grad:  # as `requires_grad_` has set it
            fake.requires_grad_(x.requires_grad)
        return fake

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The result of a function of fakes, and what runs it on others; real ones that it writes into become fake."""
        into = kwargs.get("out")
        if into is None and args and writes_into(name):
            into = args[0]
        for x in tree_leaves(into):
            if isinstance(x, Tensor) and not is_fake(x) and x.layout is torch.strided:
                memory = x.untyped_storage()
                self._written[memory.data_ptr()] = memory  # held, so that nothing else gets its address
        if self._written:
            args, kwargs = tree_map(self.followed, (args, kwargs))
        real = any(isinstance(x, Tensor) and not is_fake(x) for x in tree_leaves((args, kwargs)))
        with contextlib.nullcontext() if real else self.mode:  # faster, but what is made of the real ones has values
            if not self.hollow:
                return run_on_fakes(self.mode, func, args, kwargs)
            found = run_on_fakes(self.mode, func, args, kwargs, self._shares.asked(name, args))
        self._shares.note(name, args, kwargs, found[0])
        return found

    def tell(self, func: Any, args: Any, kwargs: Any, result: Any, unsized: bool = False) -> None:
        """Let the listener know of a function."""
        if self.listener is None:
            return
        takes = isinstance(func, tuple) or any(is_fake(x) and not is_large(x) for x in tree_leaves((args, kwargs)))
        try:
            if self.within:
                self.listener.note_within(args, kwargs, result, takes)
            else:
                self.listener.note(func, args, kwargs, result, takes, unsized)
        except Exception:  # what the listener can't take is no reason to stop the step
            self.listener = None

    def followed(self, x: Any) -> Any:
        """The fake of what fakes were written into."""
        if not isinstance(x, Tensor) or is_fake(x) or is_sharded(x) or x.layout is not torch.strided:
            return x
        return self.fake(x) if x.untyped_storage().data_ptr() in self._written else x

    def keep(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Make an event of a function that takes or gives tensors."""
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        if not tensors:
            return
        if isinstance(func, OnOnes):  # it goes by the values of real ones, when it is run again, too
            args, kwargs = tree_map(_as_it_is, (args, kwargs))
            result = tree_map(self.fake, result)
        elif not all(map(is_fake, tensors)):
            args, kwargs, result = tree_map(self.fake, (args, kwargs, result))
        self.events.append(Event(func, args, kwargs, result, user_line(), torch.is_grad_enabled()))


def _copied(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """``copy.deepcopy`` of a fake tensor; torch's own would copy its mode along, and spoil the memory of both."""
    if x.requires_grad and not x.is_leaf:
        raise RuntimeError("copy.deepcopy of a tensor that is no leaf of the graph")
    if id(x) not in memo:
        memo[id(x)] = cloned(x)
        mark_parameter(memo[id(x)], isinstance(x, nn.Parameter))
    return memo[id(x)]


def _as_it_is(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) and not is_fake(x) and not is_sharded(x) else x
