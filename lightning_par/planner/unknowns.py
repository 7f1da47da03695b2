"""What a plan assumes of a module and can't know, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lightning_par.planner.layouts.candidate import Candidate
from lightning_par.planner.messages.clipped import clips_itself
from lightning_par.strategies.startup_table import bytes_text
from lightning_par.trial.first_batch import is_users

if TYPE_CHECKING:
    from lightning_par.planner.machine.precisions import Precision
    from lightning_par.planner.planner import Planner
    from lightning_par.planner.recording.optimizer_state import OptimizerState

_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
)
"""Of a module, around a step: they may read and write weights and gradients."""


@dataclass(frozen=True)
class Unreckoned:
    """What ranks send by no formula; dry runs count it.

    Attributes:
        what: in words.
        taken: how formulas take it.
        of: whether a layout's ranks may send it.
    """

    what: str
    taken: str = "counted as if nothing"
    of: Callable[[Candidate], bool] = lambda one: one.layout.world_size > 1


def unknowns(planner: Planner) -> list[str]:
    """One line each."""
    found = [f"optimizer: {planner.optimizer.note}"] if planner.optimizer.note else []
    if planner.untransferred:
        found.append(f"not known: what comes of {planner.untransferred}: planned for the batch as it is loaded")
    found += _unreckoned(planner)
    balanced = planner.step.balanced
    if balanced:
        found.append(
            f"not known: which experts tokens go to, at {', '.join(balanced)}: counted as if each got as many, which "
            "takes, sends and keeps what it does there if they do"
        )
    if reads := [place for place in planner.step.reads if place not in balanced]:
        places = ", ".join(reads)
        found.append(
            f"not known: the values that the step reads at {places}; one way of what it does by them is counted"
        )
    if planner.step.hooked_again != planner.step.hooked:
        found.append("counted as in the second step: hooks that training_step hangs on weights, one more with each")
    found += [f"microbatches=1: {x}" for x in dict.fromkeys(one.whole for one in planner.staged) if x]
    for unknown in dict.fromkeys(one.unknown for one in planner.staged):
        if unknown:
            found.append(f"not known: whether a run would refuse a pipeline, or to cut its batch: {unknown}")
    return found


def _unreckoned(planner: Planner) -> list[str]:
    """What formulas leave out: that dry runs have counted it, or why they have not."""
    dry, told = planner.dry_runs, planner.told
    each = [x for x in unreckoned(planner) if not told or any(map(x.of, told))]
    if dry.counted and not dry.failed:
        return [f"counted in dry runs of ranks: {'; '.join(x.what for x in each)}"] if each else []
    why = f"dry runs, which count it, were left out: {'; '.join(dry.failed)}" if dry.failed else "a dry run counts it"
    return [f"not known: {x.what}; {x.taken} ({why})" for x in each]


def unreckoned(planner: Planner) -> list[Unreckoned]:
    """What hooks of the user's send, around a step and within it, callbacks, gathers and functions of the module's."""
    module, heard = planner.tree.module, planner.step.recording.heard
    found: list[Unreckoned] = []
    if any(len(backwards) > 1 for backwards in planner.step.backwards_to):
        found.append(
            Unreckoned(
                "what a backward of training_step sends along tensor and sequence where it runs through a graph again "
                "(retain_graph)", "counted as if it did not", _shares_out,
            )
        )  # fmt: skip
    if planner.step.leaves_out:
        found.append(
            Unreckoned("what is gathered ahead for layers that no backward of training_step comes to", of=_stores)
        )
    if planner.optimizer.by_whole:
        named = " and ".join(planner.optimizer.by_whole)
        found.append(Unreckoned(f"what ranks gather for {named}, which may look at whole weights, and at the loss"))
    if clips_itself(module) and not planner.by_hand:
        found.append(Unreckoned("what configure_gradient_clipping of the module sends", "counted as Lightning's own"))
    hooks = [name for name in _HOOKS if hasattr(module, name) and is_users(module, name)]
    if hooks:
        found.append(Unreckoned(f"what {' and '.join(hooks)} of the module sends, as of weights of other ranks"))
    if hasattr(module, "configure_callbacks") and is_users(module, "configure_callbacks"):
        found.append(
            Unreckoned("what callbacks that configure_callbacks of the module makes send, as of weights of other ranks")
        )
    if unstarted := planner.step.recording.unstarted:
        found.append(Unreckoned(f"what hooks before the first step do, as of gradients: without values {unstarted}"))
    if hooked := [name for name in planner.tree.hooked if name not in planner.step.whole]:
        found.append(
            Unreckoned(f"what hooks on {', '.join(hooked)} do with a gradient that data_parallel='fsdp' stores in "
                       "parts", "counted as if each gathered it once", _stores)
        )  # fmt: skip
    if gathers := heard.gathers:
        found.append(Unreckoned(f"what self.all_gather sends to other replicas at {', '.join(gathers)}"))
    if watched := heard.watched:
        found.append(
            Unreckoned(f"what is gathered of gradients for the backward hooks of {', '.join(watched)} where "
                       "shard_residual shares out tokens", of=lambda one: one.shard_residual)
        )  # fmt: skip
    if own := planner.own_functions:
        found.append(
            Unreckoned(f"what is gathered for {' and '.join(own)} along tensor and sequence, and of their gradients",
                       "counted as the functions that they call", _shares_out)
        )  # fmt: skip
    return found


def _shares_out(one: Candidate) -> bool:
    return one.layout.tensor * one.layout.sequence > 1


def _stores(one: Candidate) -> bool:
    return one.stored


def weights_alone(module: nn.Module, precision: Precision, optimizer: OptimizerState) -> str:
    """What can be said of a module whose step can't be recorded."""
    numel = sum(x.numel() for x in module.parameters())
    trained = {name: x.numel() for name, x in module.named_parameters() if x.requires_grad}
    p, o = precision, optimizer
    states = sum(size * o.others.get(name, o.most).by_element for name, size in trained.items())
    held = numel * (p.weights + p.copy) + sum(trained.values()) * p.gradients + states * p.weights / 4
    return (
        f"What can be said without it: {numel:,} parameters, whose weights, gradients and optimizer states take "
        f"{bytes_text(held)} on one device, and a share of that where data_parallel='fsdp' stores them in parts."
    )
