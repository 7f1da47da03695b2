"""What one run of a Trainer's entry point keeps for code that is handed no object of the run.

Functions of tensors, autograd's and torch's own, come without a word of the run that they belong to. They ask
`RunState.current`. Everything else of a run hangs on its strategy, or on the axes that are made for it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.broadcast import Kind, send_to_all
from lightning_par.mesh.replicas import of_all_replicas
from lightning_par.mesh.whereabouts import Whereabouts
from lightning_par.sharded.random_streams import Streams
from lightning_par.sharded.tensor_names import TensorNames

if TYPE_CHECKING:
    from lightning_par.absent.unread import Unread
    from lightning_par.checkpoint.weight_reads import WeightReads
    from lightning_par.mesh.axis import Axis
    from lightning_par.mesh.host_files import HostFiles
    from lightning_par.mesh.positions import Positions
    from lightning_par.python_state.locked_arrays import ReadOnly


class RunState:
    """The state of one run, from the strategy's ``setup`` to its ``teardown``.

    A run may begin within another's hooks. It is then the current one until it ends, and knows nothing of the other.
    (No `contextvars.ContextVar`: autograd runs the backward of a GPU on threads of its own, which would have another.)

    Attributes:
        streams: where sharded draws stand.
        running: the function whose rule runs.
        names: of weights, for ranks that say what they are about to talk of.
        shared: the axes over which gradients of what runs are shares.
        shared_between_steps: those over which a backward outside of any step begins with shares.
        shared_backward: those of the backward that runs.
        backwards: how many backwards run within each other.
        looked_at: who is told that user code reads or sets a gradient, while some are not what one device has.
        settled: how often such gradients became whole, since user code looked.
        syncs: who is told where the outermost backward begins and ends that reaches one of their leaves.
        retained: tensors that asked to keep their gradients, with the step in which they did.
        copies: that stand for views of a memory; see `lightning_par.optim.lost_writes`.
        whereabouts: what this rank has come to, for others to see.
        gathers: how often a function without a rule gathered its arguments, by (function, file:line).
        reads: brings weights that user code reads between steps; see `lightning_par.checkpoint.weight_reads`.
        copies_of_model: the ranks that train on other batches; None outside of any run.
        files: where what becomes whole for good goes to; see `lightning_par.mesh.host_files`.
        torn: why a hook on a node of autograd's graph would not meet what it does on one device, whichever node.
        hooks_alone: whether a backward runs whose hooks this rank of a pipeline alone runs.
        any_gradient: whether this rank of a pipeline holds a gradient of any weight.
        lender: who shows user code weights of all stages, of which this rank has some in parts; None in a step.
        of_copies: what all ``copies_of_model`` have of a tensor, in rank order, within a step.
        sends_objects: whether a step may send Python's objects to other copies: all ranks run it equally often.
        copies_are_processes: whether a step runs, or a trial of one, to whose code each copy of the model is a process.
        counted_processes: where user code has asked outside of steps how many processes there are.
        read_only: told of arrays and tensors of one memory, while a step runs that may only read some.
        shows_memory: whether user code was told since the last step where whole tensors lie of which ranks have parts.

    Example::

        state = RunState()
        state.begin()
        assert RunState.current is state
        state.end()
    """

    current: RunState

    def __init__(self) -> None:
        self.streams = Streams()
        self.running: Any = None
        self.names = TensorNames()
        self.whereabouts = Whereabouts()
        self.shared: tuple[Axis, ...] = ()
        self.shared_between_steps: tuple[Axis, ...] = ()
        self.shared_backward: tuple[Axis, ...] = ()
        self.backwards = 0
        self.syncs: list[weakref.ref[Any]] = []
        self.looked_at: Callable[[Tensor | None], None] | None = None
        self.settled = 0
        self.retained: list[tuple[int, Tensor]] = []
        self.copies: dict[int, tuple[Any, list[Any]]] = {}
        self.gathers: Counter[tuple[str, str]] = Counter()
        self.reads: WeightReads | None = None
        self.copies_of_model: Axis | None = None
        self.files: HostFiles | None = None
        self.torn: str | None = None
        self.hooks_alone = False
        self.any_gradient: Callable[[], bool] = bool
        self.lender: Any = None
        self.shows_memory = False
        self.read_only: ReadOnly | None = None
        self.of_copies: Callable[[Tensor], Tensor] = self._of_copies
        self.sends_objects = True
        self.copies_are_processes = False
        self.counted_processes: str | None = None
        self._outer: RunState | None = None
        self._ended = False

    def __reduce__(self) -> tuple[type[RunState], tuple[()]]:
        """A trainer that is copied or saved as a whole begins its own runs."""
        return RunState, ()

    def memory_of(self, x: Tensor) -> Unread | None:
        """What stands for the memory of ``x``, in parts or elsewhere, between steps; None where there is none."""
        return None if self.reads is None else self.reads.of(x)

    def knows(self, x: Tensor) -> bool:
        """Whether ``x`` is a weight, or another object of its memory and shape, that can be brought between steps."""
        return self.reads is not None and self.reads.knows(x)

    def is_of_weight(self, x: Tensor) -> bool:
        """Whether ``x`` has the memory of a weight in parts, or a part of that."""
        return self.reads is not None and self.reads.is_of_weight(x)

    def gathered(
        self, part: Tensor, dim: int, positions: Positions, axis: Axis, purpose: str, to_cpu: bool = False
    ) -> Tensor:
        """`collectives.gather`, to be held by all ranks along the axis from now on; all of them must call it."""
        found = None if self.files is None else self.files.gathered(part, dim, positions, axis, to_cpu)
        if found is None:
            found = self._kept(collectives.gather(part, dim, positions, axis, purpose), axis, to_cpu)
        return found

    def handed_on(
        self, x: Tensor | None, kind: Kind, source: int, axis: Axis, purpose: str, to_cpu: bool = False
    ) -> Tensor:
        """`send_to_all`, to be held by all ranks along the axis from now on; all of them must call it."""
        mine = x if axis.rank == source else None
        found = None if self.files is None else self.files.handed_on(mine, kind, axis, to_cpu)
        if found is None:
            found = self._kept(send_to_all(x, kind, source, axis, purpose), axis, to_cpu)
        return found

    def _kept(self, whole: Tensor, axis: Axis, to_cpu: bool) -> Tensor:
        whole = whole.cpu() if to_cpu else whole
        return whole if self.files is None else self.files.kept(whole, axis)

    def _of_copies(self, x: Tensor) -> Tensor:
        assert self.copies_of_model is not None
        return of_all_replicas(x, self.copies_of_model, sync_grads=False)

    def look_at_gradients(self, leaf: Tensor | None = None) -> None:
        """User code reads or sets the gradient of ``leaf``, or, without one, of a weight of any stage."""
        if self.looked_at is not None:
            self.looked_at(leaf)

    def wrote(self) -> None:
        """A tensor in parts, or a weight of any stage, is written to."""
        if self.reads is not None:
            self.reads.standing.wrote()

    def writes_once(self) -> contextlib.AbstractContextManager[None]:
        """Around a function that writes to weights of any stage: it counts as one write on each rank."""
        return contextlib.nullcontext() if self.reads is None else self.reads.standing.writes_once()

    def begin(self) -> None:
        """From now on it is the current one, until it ends."""
        self._outer, RunState.current = RunState.current, self

    def end(self) -> None:
        """The run that it began within is the current one again. To be called once the ranks have met for its end."""
        if self.reads is not None:
            self.reads.close()
            self.reads = None
        self._ended = True
        RunState.current = RunState.current._open()

    @contextlib.contextmanager
    def entered(self, copies_are_processes: bool = False) -> Iterator[None]:
        """Within, it is the current one, whichever run has begun since.

        Args:
            sends_objects: whether a step may send Python's objects to other copies: all ranks run it equally often.
        copies_are_processes: whether a step, or a trial of one, runs within, and ranks share copies of the model.
        """
        before, RunState.current = RunState.current, self
        was, self.copies_are_processes = self.copies_are_processes, copies_are_processes
        try:
            yield
        finally:
            self.copies_are_processes = was
            RunState.current = before._open()

    def _open(self) -> RunState:
        """This one or, where it has ended, the innermost one about it that has not."""
        state = self
        while state._ended and state._outer is not None:
            state = state._outer
        return state


RunState.current = RunState()  # of what runs outside of any run
