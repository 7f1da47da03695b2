"""What is changed of torch, Lightning and ``warnings`` while a strategy runs; undone when the last one is torn down.

A file says what is changed, and why. `Patches` are changes that are made and undone together, as long as somebody holds
them: `lightning_par.sharded.patches.installed`.

    autograd_functions: `torch.autograd.Function.apply`
    checkpointing: `torch.utils.checkpoint.checkpoint`
    transforms: ``torch.vmap``, those of `torch.func`, and flex attention
    collectives: those of `torch.distributed`, in steps
    generator_states: `torch.get_rng_state` and `torch.cuda.get_rng_state`
    tensor_data: ``x.data = value``
    subclasses: ``x.as_subclass(kind)``
    variables: ``torch.autograd.Variable(x)``
    asserts: ``torch._assert(x, message)``
    scripted_functions: calls of what ``torch.jit.script`` made of a function
    shared_arrays: ``x.numpy()`` and `torch.from_numpy`, while a step runs
    tensor_grad: ``x.grad``
    looked_at_gradients: ``x.grad``, while gradients are not what one device has
    module_hooks: full backward hooks of modules
    compiled_graphs: what ``torch.compile`` does with sharded tensors
    backward: `torch.autograd.backward` and `torch.autograd.grad`
    gradient_hooks: ``x.register_hook`` and ``x.retain_grad``
    graph_nodes: ``x.grad_fn``
    kept_weights: ``nn.Module.register_parameter``
    device_counts: `Trainer.num_devices`
    metric_sync: ``torchmetrics.Metric.sync``
    sync_batch_norms: ``nn.SyncBatchNorm.forward``
    dummy_experiments: what Lightning gives ranks that log nothing
    advice: warnings of Lightning's
    worker_signals: what workers of a ``DataLoader`` do about SIGTERM
    module_attributes: assignments to attributes of modules, while a trial of a step runs
    thread_pools: ``ThreadPoolExecutor.submit``, while a module is built
    float_casts: ``x.float()``, while `lightning_par.check` compares
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lightning_par.sharded.patches.installed import Patches
from lightning_par.sharded.patches.replacement import Patch
from lightning_par.strategies.namespace import Namespace

if TYPE_CHECKING:
    from lightning_par.sharded.patches.compiled_graphs import CompiledGraphs


def _for_sharded_tensors() -> Iterable[Patch]:
    from lightning_par.sharded.patches import (
        asserts,
        autograd_functions,
        checkpointing,
        module_hooks,
        scripted_functions,
        shared_arrays,
        subclasses,
        tensor_data,
        transforms,
        variables,
    )

    return autograd_functions.patch(), checkpointing.patch(), *transforms.patches(), tensor_data.patch(), \
        module_hooks.patch(), subclasses.patch(), variables.patch(), asserts.patch(), \
        scripted_functions.patch(), *shared_arrays.patches(), _compiled_graphs()  # fmt: skip


def _for_stored_weights() -> Iterable[Patch]:
    from lightning_par.sharded.patches import kept_weights, tensor_grad

    return tensor_grad.patch(), kept_weights.patch()


@functools.cache
def _compiled_graphs() -> CompiledGraphs:
    from lightning_par.sharded.patches.compiled_graphs import CompiledGraphs

    return CompiledGraphs()


def look_for_compiled() -> None:
    """Called before a step: what is compiled by now runs on parts."""
    _compiled_graphs().look()


def _for_gradient_shares() -> Iterable[Patch]:
    from lightning_par.sharded.patches import backward, gradient_hooks

    return *backward.patches(), *gradient_hooks.patches()


def _for_graph_nodes() -> Iterable[Patch]:
    from lightning_par.sharded.patches import graph_nodes

    return (graph_nodes.patch(),)


def _for_unfinished_gradients() -> Iterable[Patch]:
    from lightning_par.sharded.patches import looked_at_gradients

    return (looked_at_gradients.patch(),)


def _for_streams() -> Iterable[Patch]:
    from lightning_par.sharded.patches import generator_states

    return generator_states.patches()


def _for_collectives() -> Iterable[Patch]:
    from lightning_par.sharded.patches import collectives

    return (collectives.Collectives(),)


def _for_sync_advice() -> Iterable[Patch]:
    from lightning_par.sharded.patches.advice import SYNC, Advice

    return (Advice(SYNC),)


def _for_resume_advice() -> Iterable[Patch]:
    from lightning_par.sharded.patches.advice import RESUMABLE_LOADER, Advice

    return (Advice(RESUMABLE_LOADER),)


def _for_replicas() -> Iterable[Patch]:
    from lightning_par.sharded.patches import metric_sync, sync_batch_norms

    return metric_sync.patch(), sync_batch_norms.patch()


def _for_workers() -> Iterable[Patch]:
    from lightning_par.sharded.patches import worker_signals

    return (worker_signals.patch(),)


SHARDED = Patches(_for_sharded_tensors)
"""What would pass tensors by of which this rank has a part or nothing."""

STORED = Patches(_for_stored_weights)
"""For weights that are stored in parts, and gathered for a call."""

SHARES = Patches(_for_gradient_shares)
"""For backwards after which ranks sum up, or average, gradients."""

NODES = Patches(_for_graph_nodes)
"""For graphs that a rank has in part, or whose gradients are synced."""

UNFINISHED = Patches(_for_unfinished_gradients)
"""While ranks have shares of gradients that user code may look at."""

STREAMS = Patches(_for_streams)
"""For layers that are run without streams of random numbers, as long as they draw none."""

COLLECTIVES = Patches(_for_collectives)
"""For runs whose ranks share one model."""

SYNC_ADVICE = Patches(_for_sync_advice)
"""For runs with one replica."""

RESUME_ADVICE = Patches(_for_resume_advice)
"""For runs that are resumed within an epoch."""

REPLICAS = Patches(_for_replicas)
"""What by itself goes over all processes: for runs with processes that are no copies of the model."""

WORKER_SIGNALS = Patches(_for_workers)
"""For runs that end in good order when all processes of a job are told to."""


@functools.cache
def experiments(namespace: Namespace) -> Patches:
    """For runs whose ranks have parts of what user code logs."""
    from lightning_par.sharded.patches.dummy_experiments import patch

    return Patches(lambda: [patch(namespace)])


@functools.cache
def replica_counts(namespace: Namespace) -> Patches:
    """For runs in which several devices share a model, as soon as hooks run."""
    from lightning_par.sharded.patches.device_counts import patch

    return Patches(lambda: [patch(namespace)])


def all_kinds(namespace: Namespace) -> tuple[Patches, ...]:
    """All that a strategy may hold."""
    return (
        SHARDED,
        STORED,
        SHARES,
        NODES,
        UNFINISHED,
        STREAMS,
        COLLECTIVES,
        SYNC_ADVICE,
        RESUME_ADVICE,
        REPLICAS,
        WORKER_SIGNALS,
        experiments(namespace),
        replica_counts(namespace),
    )
