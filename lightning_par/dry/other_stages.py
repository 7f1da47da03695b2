"""What the ranks of a pipeline's other stages would tell of the states that they hold, where none of them is there.

Who holds which weight is decided alike on all ranks, and a state of torch's own optimizers depends on its parameter
alone: a step of the same optimizer on what stands for that parameter makes one like it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.checkpoint.inventory import Inventory, Told, entry
from lightning_par.checkpoint.owners import Place
from lightning_par.fsdp.part import StoragePart
from lightning_par.fsdp.stored_parameter import Stored, dim_of
from lightning_par.mesh.broadcast import Pickled
from lightning_par.mesh.layout import Groups
from lightning_par.mesh.ledger import uncounted
from lightning_par.optim.lone_step import state_after_a_step
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.tensors import mark_parameter
from lightning_par.sharded.tensor import ShardedTensor


class UnknownStateError(Exception):
    """What other stages hold can't be told from here; says why."""


class DryInventory(Inventory):
    """The inventory of a checkpoint for which nobody else can be asked.

    Attributes:
        others: called with the values that this rank takes, says what each rank along the pipeline would tell; None
            where there is one stage.
    """

    others: Callable[[Mapping[Any, Any]], list[Told]] | None = None

    def _exchanged(self, mine: Told, values: Mapping[Any, Any]) -> list[Told]:
        told = super()._exchanged(mine, values)
        return told if self.others is None else self.others(values)


@dataclass
class OtherStages:
    """What the other stages of this rank's pipeline hold.

    Args:
        module: spread.
        groups: the mesh axes.
        holders: of a tensor by its first name, as indices along the pipeline axis.
        storage: the part that stores weights in parts, if there is one.
        whole: names of the weights in whose memory others lie, too.
        trained: first names of the parameters that have a gradient; None where that is not known.
        fake: any tensor without values.

    Example::

        stages = OtherStages(module, groups, placement_of, None, (), {"head.weight"}, fake)
        inventory.others = stages.weights
        weights = model_state(module.state_dict(), inventory)
    """

    module: nn.Module
    groups: Groups
    holders: Callable[[str], tuple[int, ...]]
    storage: StoragePart | None
    whole: Collection[str]
    trained: Collection[str] | None
    fake: Tensor

    def __post_init__(self) -> None:
        module = self.module
        named = itertools.chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        )
        self._first: dict[int, str] = {}
        self._named: dict[str, Tensor] = {}
        for name, x in named:
            self._first.setdefault(id(x), name)
            self._named[name] = x
        self._made: dict[str, Tensor] = {}
        self._states: dict[tuple[Any, ...], dict[Any, Any]] = {}

    # ------------------------------------------------------------------------------------------------- what they tell

    def weights(self, values: Mapping[Any, Any]) -> list[Told]:
        """Of the module's state, of which ``values`` are as they are here.

        Raises:
            UnknownStateError: a hook has put something into it that it made of weights.
        """
        told = self._nothing()
        for name, x in values.items():
            tensor = self._named.get(name)
            if tensor is None:  # hooks have added it, on all ranks
                if isinstance(x, ShardedTensor | FakeTensor) or is_elsewhere(x):  # what has values is no weight's
                    raise UnknownStateError(
                        f"which ranks have {name!r}, which is no name of a weight or buffer, can't be told"
                    )
                self._tell(told, tuple(range(self.groups.pipeline.size)), {name: x})
                continue
            there = self._stand_in(tensor) if is_elsewhere(x) else x
            self._tell(told, self.holders(self._name(tensor)), {name: there})
        return told

    def states(self, optimizer: Optimizer, values: Mapping[Any, Any]) -> list[Told]:
        """Of the state of ``optimizer``, of which ``values`` are those here: by a parameter's number, and name."""
        told, own = self._nothing(), defaultdict[int, dict[Any, Any]](dict)
        for key, x in values.items():
            own[key[0]][key] = x
        for number, (p, group) in enumerate(_parameters(optimizer)):
            name = self._name(p)  # one that is not the module's is everybody's
            mine = own.get(number, {})
            if is_elsewhere(p):
                state = self.state_there(optimizer, p, group)
                mine = {} if state is None else {(number,): None, **{(number, key): x for key, x in state.items()}}
            self._tell(told, self.holders(name), mine)
        return told

    def in_parts(self, parameters: Mapping[str, Any]) -> dict[str, str]:
        """Over which axis each of these ``parameters`` is kept in parts where it is, by name; none of the others."""
        found = {}
        for name, p in parameters.items():
            with contextlib.suppress(UnknownStateError):
                there = self._stand_in(p) if is_elsewhere(p) else p
                if isinstance(there, ShardedTensor):
                    found[name] = there.axis.name
        return found

    def _nothing(self) -> list[Told]:
        return [{} for _ in range(self.groups.pipeline.size)]

    def _tell(self, told: list[Told], holders: tuple[int, ...], values: Mapping[Any, Any]) -> None:
        for stage in holders:
            for key, x in values.items():
                told[stage][key] = self._moved(entry(x, self.groups), stage)

    def _moved(self, told: Place | Pickled, stage: int) -> Place | Pickled:
        """What the ranks of ``stage`` tell of that of which this one's would have ``told``."""
        layout, place = self.groups.layout, told
        if isinstance(place, Pickled):
            return place
        return replace(place, ranks=tuple(layout.moved(rank, "pipeline", stage) for rank in place.ranks))

    # --------------------------------------------------------------------------------------------- what they hold it as

    def _stand_in(self, x: Any) -> Tensor:
        """What the rank of another stage has for ``x`` that is elsewhere, in this one's place along the other axes."""
        name = self._first.get(id(x), self._name(x))
        if name not in self._made:
            self._made[name] = self._standing(x, name)
        return self._made[name]

    def _name(self, x: Any) -> str:
        """By which it is known who holds ``x``: that of the weight of which it is a copy, made since the run began."""
        return vars(x).get("_of") or self._first.get(id(x)) or (x.origin.name if is_elsewhere(x) else "")

    def _standing(self, x: Any, name: str) -> Tensor:
        shape, sharding = list(x.shape), x.origin.sharding
        if sharding is not None:
            dim, positions, axis = sharding
            shape[dim] = positions.count(axis.rank)
        held: Tensor = self.fake.new_empty(shape, dtype=x.dtype, device=x.device)
        if not isinstance(x, nn.Parameter):
            return held if sharding is None else ShardedTensor(held, *sharding)
        there: Tensor = nn.Parameter(held, requires_grad=x.requires_grad)
        if sharding is not None:
            there = ShardedTensor(there, *sharding)
            mark_parameter(there)
        storage = self.storage
        if storage is None or dim_of(there, storage.peers.size) is None:
            return there
        if name in self.whole:  # it stays whole where its stage has these others
            raise UnknownStateError(f"{name!r}, which is on another stage, shares memory with other tensors")
        return Stored.of(there, storage.all, storage.peers)

    def state_there(self, optimizer: Optimizer, p: Any, group: Mapping[str, Any]) -> dict[Any, Any] | None:
        """What ``optimizer`` keeps of ``p`` where it is; None where that has no gradient.

        Raises:
            UnknownStateError: that is not known.
        """
        if not p.requires_grad:
            return None
        if self.trained is None:
            raise UnknownStateError(
                "which parameters of other stages have a gradient can't be told, as where random numbers or values of "
                "the model decide what the step computes"
            )
        if self._name(p) not in self.trained:
            return None
        there = self._stand_in(p)
        alike = id(group), *_form(there)  # one step for all that lie alike
        try:
            if alike not in self._states:
                with uncounted(), contextlib.nullcontext() if self.storage is None else self.storage.peers.apart():
                    self._states[alike] = state_after_a_step(optimizer, there, group)
            return self._states[alike]
        except Exception as error:  # as of one that takes sparse gradients
            raise UnknownStateError(
                f"what {type(optimizer).__name__} keeps of {self._name(p)!r}, which is on another stage, can't be "
                f"told ({type(error).__name__}: {error})"
            ) from error


def _form(p: Tensor) -> tuple[Any, ...]:
    """What decides where a parameter and its state lie, but for the stage; equal positions are the same object."""
    over = (p.sharded_dim, id(p.positions), id(p.axis)) if isinstance(p, ShardedTensor) else ()
    return tuple(p.shape), p.dtype, p.device, *over


def _parameters(optimizer: Optimizer) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """In the order of their numbers in a state dict, with their groups."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield p, group
