"""The mode that notes a trial run on sharded tensors, and what the same step would do on whole ones.

The user's step runs once for both: each function that it calls is run on the whole twins of its arguments, too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from lightning_par.private.fake_tensors import FakeTensor, FakeTensorMode
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.transforms import in_functorch
from lightning_par.sharded.functions import HOOKS, READS
from lightning_par.trial.fake_functions import is_fake, is_sharded
from lightning_par.trial.function_recorder import Recorder
from lightning_par.trial.guesses import Guesses
from lightning_par.trial.listener import Listener

_ONCE = HOOKS | {"grad", "backward"}  # what may run the user's code, which is not to run twice


class TwinError(Exception):
    """It is not known what the step would do on whole tensors."""


class TwinRecorder(Recorder):
    """Notes every torch function, and in `plain` what it is on whole tensors.

    Args:
        mode: of the fakes.
        guesses: what the user's code is told of values that are not there.
        listener: is told of the functions on whole tensors.

    Attributes:
        plain: its events are those of the step on whole tensors; None once it is not known what they would be.
        roots: ids of the fakes that the module holds, which are whole.
    """

    def __init__(self, mode: FakeTensorMode, guesses: Guesses, listener: Listener | None = None) -> None:
        super().__init__(mode, guesses)
        self.plain: Recorder | None = Recorder(mode, Guesses(), listener)
        self.roots: Collection[int] = ()
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}  # by id; both are held, so that no other gets it

    def whole(self, value: Any) -> Any:
        """``value`` with whole tensors for sharded ones.

        Raises:
            TwinError: it has one that came of no function that was seen.
        """
        return tree_map(self._whole, value)

    def written_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        plain = self.plain
        if plain is None:
            return super().written_out(func, args, kwargs)
        plain.within += 1
        try:
            out = super().written_out(func, args, kwargs)
        finally:
            plain.within -= 1
        if out is not NotImplemented:
            self._do(lambda plain: plain.tell(func, *self.whole((args, kwargs)), self.whole(out)))
        return out

    def noted(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        given: list[Any] = []  # before anything is written into it
        if name in _ONCE or in_functorch():
            self.plain = None
        self._do(lambda plain: given.extend(self.whole((args, kwargs))))
        takes_fakes = self.plain is not None and _any_fake(tree_map(self.followed, (args, kwargs)))
        result = super().noted(func, name, args, kwargs)
        self._do(lambda plain: self._follow(plain, func, name, takes_fakes, given, result))
        return result

    def took(self, method: str, *args: Any, **kwargs: Any) -> None:
        super().took(method, *args, **kwargs)
        self._do(lambda plain: plain.took(method, *self.whole(args), **self.whole(kwargs)))

    def took_by(self, func: Any, value: Any) -> None:
        super().took_by(func, value)
        self._do(lambda plain: plain.took_by(func, self.whole(value)))

    def _do(self, act: Any) -> None:
        if self.plain is None:
            return
        try:
            act(self.plain)
        except Exception:  # whatever functions raise on whole tensors alone: the step must run on these by itself
            self.plain = None

    def _follow(self, plain: Recorder, func: Any, name: str, takes_fakes: bool, given: Any, result: Any) -> None:
        args, kwargs = tree_map(plain.followed, tuple(given))
        if _any_fake((args, kwargs)) != takes_fakes:
            raise TwinError
        if not takes_fakes:  # what depends on the batch alone is computed whole
            found = tree_map(_of_batch, result)
            plain.tell(func, args, kwargs, found)
            plain.keep(func, args, kwargs, found)
        elif name in READS:
            plain.keep_read(func, args, kwargs)
        else:
            self._pair(result, plain.noted(func, name, args, kwargs))

    def _pair(self, result: Any, whole: Any) -> None:
        ours, theirs = tree_leaves(result), tree_leaves(whole)
        if len(ours) != len(theirs):
            raise TwinError
        for x, twin in zip(ours, theirs):
            if not isinstance(x, Tensor):
                continue
            if not isinstance(twin, Tensor) or x.shape != twin.shape or x.dtype != twin.dtype:
                raise TwinError
            if id(x) in self.roots or id(x) in self._twins:
                if self._whole(x) is not twin:
                    raise TwinError
            elif x is not twin:
                self._twins[id(x)] = x, twin

    def _whole(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in self._twins:
            return self._twins[id(x)][1]
        if id(x) in self.roots:
            return x
        if is_sharded(x) and not is_fake(x):
            return _of_batch(x)
        if isinstance(x, FakeTensor) or type(x) not in (Tensor, nn.Parameter):
            raise TwinError
        return x


def _any_fake(value: Any) -> bool:
    return any(isinstance(x, Tensor) and is_fake(x) for x in tree_leaves(value))


def _of_batch(x: Any) -> Any:
    """All of a tensor that depends on the batch alone."""
    if is_sharded(x):
        if is_fake(x):
            raise TwinError
        return x.full_tensor()
    return x
