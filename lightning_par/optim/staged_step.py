"""An optimizer's step where each stage holds some of the parameters: followed on all ranks, computed where they are.

A tensor that depends on parameters of one stage is *located*: functions of it run on the ranks that hold it, and the
others, which run the same code, keep an `Elsewhere` for it. What needs tensors of several stages, or a number for
Python, has them sent to all; a norm over all parameters is then one device's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.absent.origin import Origin
from lightning_par.mesh.broadcast import send_to_all
from lightning_par.mesh.handshake import refuse_alone
from lightning_par.mesh.host_values import on_device
from lightning_par.optim.away_results import AwayResults, on_meta
from lightning_par.optim.following import Following
from lightning_par.optim.function_facts import Effect, Function, function_of
from lightning_par.optim.remote_state import StatesAway, steps_over_stages
from lightning_par.optim.value_places import Place, StagePlaces, covers, find_places, innermost, mark, place_of, unmark
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.storage import memory_of
from lightning_par.sharded.functions import LIKE_ANOTHER
from lightning_par.sharded.rules.gather_report import on_send
from lightning_par.sharded.tensor import ShardedTensor, full, leaf

_SMALL = 4096  # entries of tensors that travel together
_WITH_NUMBERS = tuple(f"_foreach_{name}{behind}" for name in ("addcdiv", "addcmul") for behind in ("", "_"))
_STAY = (Effect.BY_ELEMENT, Effect.NEW, Effect.READS, Effect.VIEWS)


class FollowingStages(Following):
    """As `Following`, where some parameters are on some ranks alone.

    Args:
        stages: who holds what.
        optimizer: whose step it is.
        away: what is kept of its state between steps.
        results: of functions on what is elsewhere, as its steps so far had them.
    """

    brings_what_is_elsewhere = True

    def __init__(self, stages: StagePlaces, optimizer: Optimizer, away: StatesAway, results: AwayResults) -> None:
        super().__init__()
        self._results = results
        self.axis, self._stages, self._optimizer, self._away = stages.axis, stages, optimizer, away
        self._gradients_known = False
        self._memories: dict[int, tuple[Origin, Tensor]] = {}  # of copies whose address may be known, by the origin

    def __enter__(self) -> Any:
        self._begin()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._end()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        self._end()
        with super().suspended():
            yield
        self._begin()

    def _located(self) -> list[Tensor]:
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        return [p for p in parameters if self._stages.holders(p) is not None]

    def _begin(self) -> None:
        self._away.show(self._optimizer, self._stages)
        self._gradients_known = False
        for p in self._located():
            mark(p, None if isinstance(p, Elsewhere) else self._stages.holders(p))

    def _end(self) -> None:
        for p in self._located():
            if isinstance(p, Elsewhere):
                p.grad = None  # it stood for the gradient within the step alone
            else:
                unmark(p)
        self._away.hide(self._optimizer)

    def _learn_gradients(self) -> None:
        """Let every rank know which parameters have a gradient, on the ranks that hold them."""
        refuse_alone(self.axis, steps_over_stages(self._optimizer))
        self._gradients_known = True
        located = list({id(p): p for p in self._located()}.values())
        mine = [not isinstance(p, Elsewhere) and leaf(p).grad is not None for p in located]
        if any(leaf(p).grad.is_sparse for p, there in zip(located, mine) if there):  # type: ignore[union-attr]
            raise TypeError(
                "An optimizer that is not torch's own meets a sparse gradient. Make layers with sparse=False."
            )
        device = next((leaf(p).device for p in located), torch.device("cpu"))
        flags = self.axis.all_reduce_(on_device(mine, torch.uint8, device), "gradient flags", "max")
        for p, there in zip(located, flags.tolist()):
            if isinstance(p, Elsewhere):
                p.grad = Elsewhere(p.shape, p.dtype, p.device, replace(p.origin)) if there else None

    # ------------------------------------------------------------------------------------------------------- functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        places: set[Place] = set()
        if not self._paused:
            find_places(args, places)
            find_places(kwargs.values(), places)
        if not places:
            return super().__torch_function__(func, types, args, kwargs)
        function = function_of(func)
        if function.kind is Effect.METADATA:
            return self._metadata(func, function, args, kwargs)
        if function.name == "__set__":
            return self._set(func, *args)
        if function.kind is Effect.LISTS or function.name.startswith("_foreach_"):
            return self._lists(func, function, args, kwargs)
        like = function.name in LIKE_ANOTHER
        if like and place_of(args[0]) is None:
            return self._here(func, args, kwargs)
        home = place_of(args[0]) if like else _home(function, args, kwargs, places)
        if home is None or not _stays(function, args, kwargs):
            return self._everywhere(func, function, args, kwargs)
        sent = {} if like or len(places) == 1 else self._sent(func, (args, kwargs), home)
        if sent:
            args, kwargs = tree_map(lambda x: sent.get(id(x), x), (args, kwargs))
        self._gradients_known &= function.name != "backward"  # a backward makes new ones
        if self.axis.rank not in home:
            return self._results.away(
                func, function, args, kwargs, Origin("a tensor of the optimizer's", home, self.axis)
            )
        result = self._here(func, args, kwargs)
        if isinstance(result, Tensor):
            mark(result, home)
        elif not function.writes:
            tree_map(lambda x: mark(x, home), result)
        return result

    def _here(self, func: Any, args: Any, kwargs: Any) -> Any:
        return super().__torch_function__(func, (), args, kwargs)

    def _memory_for(self, x: Any) -> Tensor:
        """As much memory as ``x`` has where it is, the same for all that share it."""
        if id(x.origin) not in self._memories:
            self._memories[id(x.origin)] = x.origin, torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return self._memories[id(x.origin)][1]

    def _metadata(self, func: Any, function: Function, args: Any, kwargs: Any) -> Any:
        if function.name == "grad" and not self._gradients_known:
            self._learn_gradients()
        result = self._here(func, args, kwargs)
        if isinstance(result, Tensor) and not isinstance(result, Elsewhere):
            mark(result, place_of(args[0]))
        return result

    def _set(self, func: Any, x: Tensor, value: Any) -> None:
        """``x.grad = value`` and the like."""
        home = place_of(x)
        sent = self._sent(func, value, home)
        value = sent.get(id(value), value)
        if isinstance(x, Elsewhere) and isinstance(value, Tensor):
            value = Elsewhere(value.shape, value.dtype, x.device, replace(x.origin))
        self._here(func, (x, value), {})

    def _everywhere(self, func: Any, function: Function, args: Any, kwargs: Any) -> Any:
        """Call ``func`` on all ranks, where the tensors that it needs have been sent to."""
        sent = self._sent(func, (args, kwargs), None)
        located = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and place_of(x) is not None}
        for i, x in located.items() if function.kind is Effect.OTHER else ():
            if i in sent:  # whose address may be taken
                sent[i] = self._memory_for(x).copy_(sent[i])
        original = {id(sent.get(i, x)): x for i, x in located.items()}
        new_args, new_kwargs = tree_map(lambda x: sent.get(id(x), x), (args, kwargs))
        result = self._here(func, new_args, new_kwargs)
        if function.kind in (Effect.READS, Effect.NUMBER):
            return result
        memories = {memory_of(self._memory(sent.get(i, x))): x for i, x in located.items()}

        def returned(x: Any) -> Any:
            if not isinstance(x, Tensor) or id(x) in original:
                return original.get(id(x), x)
            source = memories.get(memory_of(leaf(x)))
            if isinstance(source, Elsewhere):
                return Elsewhere(x.shape, x.dtype, x.device, replace(source.origin))
            mark(x, None if source is None else place_of(source))
            return x

        return tree_map(returned, result)

    def _memory(self, x: Tensor) -> Tensor:
        """What has the memory of views of ``x``."""
        whole = self.wholes.of(x) if isinstance(x, ShardedTensor) else None
        return leaf(x) if whole is None else whole

    @torch.no_grad()
    def _sent(self, func: Any, values: Any, home: Place | None) -> dict[int, Tensor]:
        """Send the located tensors in ``values`` that are not all at ``home``; to all ranks, which all must call it.

        Returns:
            What has arrived, by the id of the tensor that it stands for.
        """
        found = {id(x): x for x in tree_leaves(values) if isinstance(x, Tensor)}
        located = [(place, x) for x in found.values() if (place := place_of(x)) is not None]
        # Python may turn a comparison of two tensors round, where one is of a subclass.
        asked = [x for place, x in sorted(located, key=lambda pair: pair[0]) if not covers(place, home)]
        for x in asked[:1]:
            on_send(func, x, self.axis)
        arrived: dict[int, Tensor] = {}
        small: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for x in asked:
            source: int = place_of(x)[0]  # type: ignore[index]
            if x.numel() <= _SMALL:
                small.setdefault((source, x.dtype), []).append(x)
            else:
                arrived[id(x)] = self._broadcast(self._whole(x), tuple(x.shape), x.dtype, source).to(x.device)
        for (source, dtype), those in small.items():  # a message for all of a stage's norms
            wholes = [self._whole(x) for x in those]
            flat = None if wholes[0] is None else torch.cat([x.reshape(-1) for x in wholes])  # type: ignore[union-attr]
            sizes = [x.numel() for x in those]
            parts = self._broadcast(flat, (sum(sizes),), dtype, source).split(sizes)
            arrived.update({id(x): part.view(x.shape).to(x.device) for x, part in zip(those, parts)})
        return {i: x for i, x in arrived.items() if isinstance(found[i], Elsewhere)}

    def _whole(self, x: Tensor) -> Tensor | None:
        """All of ``x``, on ranks that hold it."""
        if isinstance(x, Elsewhere):
            return None
        standing = self.wholes.of(x) if isinstance(x, ShardedTensor) else None
        return full(x) if standing is None else standing

    def _broadcast(self, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
        return send_to_all(x, (shape, dtype), source, self.axis, "optimizer")

    def _lists(self, func: Any, function: Function, args: Any, kwargs: Any) -> Any:
        """Call a function of lists for each entry where it is."""
        n = len(args[0])
        named = list(kwargs)
        given = [*args, *kwargs.values()]
        given = [x.tolist() if _numbers_of_lists(function, x, n) else x for x in given]
        lists = [isinstance(x, (list, tuple)) and len(x) == n for x in given]
        sent = self._sent(func, [x for x, is_list in zip(given, lists) if not is_list], None)
        homes: list[Place | None] = []
        for i in range(n):
            together = [x[i] for x, is_list in zip(given, lists) if is_list and isinstance(x[i], Tensor)]
            places = {place for x in together if (place := place_of(x)) is not None}
            homes.append(place_of(together[0]) if function.writes or not places else innermost(places))
            sent.update(self._sent(func, together, homes[i]))
        given = tree_map(lambda x: sent.get(id(x), x), given)
        results: list[Any] = [None] * n
        for here in (True, False):
            chosen = [i for i, home in enumerate(homes) if (home is None or self.axis.rank in home) is here]
            if not chosen or function.writes and not here:
                continue
            some = [[x[i] for i in chosen] if is_list else x for x, is_list in zip(given, lists)]
            rest = dict(zip(named, some[len(args) :]))
            made = self._here(func, some[: len(args)], rest) if here else on_meta(func, some[: len(args)], rest)
            for i, x in zip(chosen, made if not function.writes else ()):
                origin = Origin("a tensor of the optimizer's", homes[i] or (), self.axis)
                results[i] = x if here else Elsewhere(x.shape, x.dtype, given[0][i].device, origin)
                mark(results[i], homes[i] if here else None)
        if function.writes:  # torch returns what it wrote into
            return args[0] if function.name.startswith("_foreach_") else None
        return results


def _numbers_of_lists(function: Function, x: Any, n: int) -> bool:
    """Whether a tensor has a number for each of a list's ``n`` tensors, as `torch._foreach_addcdiv` may be given."""
    return function.name in _WITH_NUMBERS and isinstance(x, Tensor) and x.shape == (n,) and place_of(x) is None


def _home(function: Function, args: Any, kwargs: Any, places: set[Place]) -> Place | None:
    """Where a function of tensors at ``places`` may run; None for everywhere."""
    into = kwargs.get("out", args[0] if function.writes and args else None)
    if into is None:
        return innermost(places)
    return place_of(into) if isinstance(into, Tensor) else None


def _stays(function: Function, args: Any, kwargs: Any) -> bool:
    """Whether a function may run where its arguments are: the other ranks can tell the shape of its result."""
    if function.name in ("__setitem__", "backward"):
        return True
    if function.name == "where" and len(args) + len(kwargs) == 1:
        return False
    if function.name == "__getitem__":
        return not any(isinstance(x, Tensor) for x in tree_leaves(args[1:]))
    return function.kind in _STAY
