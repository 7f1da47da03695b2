"""The tensor axis' plan: which parameter is split along which dim, and who holds what of it.

A pure function of a recording, the number of ranks and the user's wishes; printable, tested without a process.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
from torch import nn

from lightning_par.mesh.positions import Array, Positions
from lightning_par.tensor.propagate import Found
from lightning_par.tensor.search import Search
from lightning_par.tensor.symbolic_ranks import count_units
from lightning_par.trial.recording import Recording

Style = Literal["colwise", "rowwise", "replicate"]
WORTH_NORMS = 0.1  # of all weights; for less, none is split so that a norm runs over split features
STYLES = ("colwise", "rowwise", "replicate")


@dataclass(frozen=True)
class Split:
    """One parameter, split along ``dim``.

    ``colwise`` opens an island: its output is sharded. ``rowwise`` ends one with an all-reduce. ``names`` are all of
    the parameter's names: a tied one has several.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dim: int
    style: str
    positions: Positions

    def part(self, rank: int) -> tuple[int, ...]:
        """The shape of what ``rank`` holds."""
        return (*self.shape[: self.dim], self.positions.count(rank), *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class TensorPlan:
    """What is split and how, and why the rest is not.

    Attributes:
        ranks: the size of the tensor axis.
        splits: every split parameter.
        whole: the names and shapes of the parameters that every rank holds whole, and the reason.
        gathers: functions that gather within an island that is kept all the same, and how often.
        note: what the recording could not see, or None.
    """

    ranks: int
    splits: tuple[Split, ...] = ()
    whole: tuple[tuple[tuple[str, ...], tuple[int, ...], str], ...] = ()
    gathers: dict[str, int] = field(default_factory=dict)
    note: str | None = None

    def numel(self, rank: int) -> int:
        """Parameters that ``rank`` holds."""
        split = sum(int(np.prod(s.part(rank))) for s in self.splits)
        return split + sum(int(np.prod(shape)) for _, shape, _ in self.whole)


def check_styles(wishes: Mapping[str, str] | None) -> None:
    """Raises ValueError, or TypeError, where ``wishes`` is no mapping of patterns to known styles."""
    if wishes is not None and not isinstance(wishes, Mapping):
        raise TypeError(
            f"plan must be a dict of module names or patterns to styles, got {type(wishes).__name__}. Write e.g. "
            'plan={"blocks.*.mlp.up": "colwise"}.'
        )
    for pattern, style in (wishes or {}).items():
        if not isinstance(pattern, str):
            raise TypeError(f"plan[{pattern!r}]: a name or a pattern must be a str, not {type(pattern).__name__}.")
        if style not in STYLES:
            known = ", ".join(map(repr, STYLES))
            raise ValueError(f"plan[{pattern!r}] = {style!r} is no known style. Write one of {known}.")


def styles_for(module: nn.Module, wishes: Mapping[str, str] | None) -> dict[str, Style]:
    """The style that the user's plan gives each parameter, by its first name; patterns are FQN globs.

    Raises:
        ValueError: an unknown style, or a pattern that matches no module and no parameter, or vectors alone.

    Example::

        styles = styles_for(nn.Sequential(nn.Linear(4, 4)), {"0": "colwise"})
        assert styles == {"0.weight": "colwise", "0.bias": "colwise"}
    """
    check_styles(wishes)
    styles: dict[str, Style] = {}
    parameters = [name for name, _ in module.named_parameters()]
    every = [*(name for name, _ in module.named_parameters(remove_duplicate=False))]
    owners = {name: name.rpartition(".")[0] for name in every}
    # reversed, so that the first name of a tied one stays
    first = {id(p): name for name, p in reversed(list(module.named_parameters(remove_duplicate=False)))}
    for pattern, style in (wishes or {}).items():
        hits = [name for name in every if fnmatchcase(name, pattern) or fnmatchcase(owners[name], pattern)]
        if not hits:
            modules = [name for name, _ in module.named_modules() if name]
            near = difflib.get_close_matches(pattern, [*modules, *parameters], n=3, cutoff=0.4)
            hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
            raise ValueError(f"plan[{pattern!r}] matches no module and no parameter of {type(module).__name__}.{hint}")
        if style != "replicate" and all(module.get_parameter(name).ndim < 2 for name in hits):
            raise ValueError(
                f"plan[{pattern!r}] = {style!r} matches vectors alone: {', '.join(hits[:3])}. They are split with the "
                "layer that they belong to. Name a layer with a weight matrix, or write 'replicate'."
            )
        for name in hits:
            styles[first[id(module.get_parameter(name))]] = style  # type: ignore[assignment]
    return styles


def make_plan(
    recording: Recording,
    ranks: int,
    styles: Mapping[str, str] | None = None,
    whole_for: Mapping[str, str] | None = None,
) -> TensorPlan:
    """Infer how to split the parameters of ``recording`` over ``ranks``, keeping to ``styles`` (by first name).

    Those of ``whole_for`` stay whole, for the reasons that it gives.

    Raises:
        ValueError: a parameter can't be split as ``styles`` says.
    """
    styles = dict(styles or {})
    by_id = {id(fake): names for names, fake in recording.parameters.items()}
    wishes = {key: styles[names[0]] for key, names in by_id.items() if names[0] in styles}
    # vectors go with their layers
    wishes = {key: style for key, style in wishes.items() if style == "replicate" or _is_matrix(recording, by_id[key])}
    reasons = {key: (whole_for or {})[names[0]] for key, names in by_id.items() if names[0] in (whole_for or {})}
    dealt = deal(recording, ranks, wishes, reasons)
    search = dealt.search
    _check_wishes(dealt, wishes, by_id, ranks)
    splits, whole = [], []
    for key, names in by_id.items():
        shape = tuple(search.parameters[key].shape)
        if key in search.found:
            found = search.found[key]
            splits.append(Split(names, shape, found.dim, found.style, dealt.positions[key]))
        else:
            whole.append((names, shape, search.whole.get(key, _default_reason(recording, shape, ranks))))
    return TensorPlan(ranks, tuple(splits), tuple(whole), dict(Counter(search.gathered.values())), recording.stopped)


@dataclass(frozen=True, eq=False)
class Dealt:
    """The islands of a recording, dealt out to ranks.

    Attributes:
        search: what is split, by the ids of the recording's fakes.
        units: which labels can't be taken apart.
        positions: who holds what of each split parameter, by the same ids.
    """

    search: Search
    units: Array
    positions: dict[int, Positions]

    def groups(self, key: int) -> int:
        """Into how many groups of features that can't be taken apart a split parameter falls."""
        return count_units(self.units, self.search.found[key].labels.owner)


def deal(
    recording: Recording, ranks: int, styles: Mapping[int, str] | None = None, whole: Mapping[int, str] | None = None
) -> Dealt:
    """Find the islands of ``recording`` and deal their features out to ``ranks``.

    Args:
        recording: of a step.
        ranks: along the tensor axis.
        styles: the user's, by the ids of the parameters' fakes.
        whole: parameters that stay whole, by the same ids, and why.

    Example::

        dealt = deal(recording, ranks=2)
        assert all(positions.count(0) for positions in dealt.positions.values())
    """
    search, units = _searched(recording, ranks, dict(styles or {}), dict(whole or {}))
    owner_of_unit: dict[int, int] = {}
    positions = {
        key: Positions.of(_owners(search.found[key], units, ranks, owner_of_unit))
        for key in search.parameters
        if key in search.found
    }
    return Dealt(search, units, positions)


def _searched(recording: Recording, ranks: int, wishes: dict[int, str], whole: dict[int, str]) -> tuple[Search, Array]:
    """The islands, if possible without norms over split features: those are allowed where they save much."""
    if ranks == 1:
        return Search(recording, ranks=ranks, styles=wishes, whole=dict(whole)), np.arange(0)
    asked = any(style != "replicate" for style in wishes.values())
    search = Search(recording, ranks=ranks, styles=wishes, whole=dict(whole), norms=asked)
    units = search.run()
    if not search.stopped_at_norm:
        return search, units
    other = Search(recording, ranks=ranks, styles=wishes, whole=dict(whole))
    others = other.run()
    saves = _split_elements(other) - _split_elements(search)
    return (other, others) if saves > WORTH_NORMS * search.elements else (search, units)


def _split_elements(search: Search) -> int:
    return sum(search.parameters[key].numel() for key in search.found)


def _is_matrix(recording: Recording, names: tuple[str, ...]) -> bool:
    return recording.parameters[names].ndim > 1


def _owners(found: Found, units: Array, ranks: int, owner_of_unit: dict[int, int]) -> list[int]:
    """The rank of each index; new units are dealt out in contiguous runs, the first ranks one more."""
    own = units[found.labels.owner]
    new = [int(unit) for unit in dict.fromkeys(own.tolist()) if unit not in owner_of_unit]
    for rank, run in enumerate(np.array_split(np.array(new, dtype=int), ranks)):
        owner_of_unit.update((int(unit), rank) for unit in run)
    return [owner_of_unit[unit] for unit in own.tolist()]


def _default_reason(recording: Recording, shape: tuple[int, ...], ranks: int) -> str:
    if ranks == 1:
        return "one rank"
    if len(shape) < 2:
        return "a vector outside the islands"
    return "not used in a product" if recording.stopped is None else "the recording ended before it was used"


def _check_wishes(dealt: Dealt, wishes: dict[int, str], by_id: dict[int, tuple[str, ...]], ranks: int) -> None:
    search = dealt.search
    torn = {key: reason for reasons in search.torn.values() for key, reason in reasons.items()}
    for key, style in wishes.items():
        if style == "replicate" or ranks == 1:
            continue
        name, shape = by_id[key][0], tuple(search.parameters[key].shape)
        why = torn.get(key)
        if key not in search.found:
            stopped = search.recording.stopped
            unseen = (
                "the step does not use it in a product"
                if stopped is None
                else f"the step could not be recorded ({stopped})"
            )
            why = search.whole.get(key, unseen)
        elif (count := dealt.groups(key)) < ranks:
            why = f"there are only {count} groups of features that can be taken apart, fewer than ranks"
        if why is not None:
            raise ValueError(
                f"plan asks for {name} {shape} to be {style} over {ranks} ranks, which can't be: {why}. "
                f"Write 'replicate' for it, or leave it out of the plan."
            )
