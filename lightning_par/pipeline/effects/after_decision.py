"""What the step's own code sets in units behind a decision by a value of the model: ``if loss < 1: self.net.p = 0.5``.

Other ranks don't have the value. What the step sets where a trial or a dry run comes to it is set on all of them;
behind a decision that none has come to it would be set on the last stage's rank alone.
"""

from __future__ import annotations

from lightning_par.pipeline.effects.unit_reach import is_within
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.run.errors import OtherStageError
from lightning_par.pipeline.trial.code_attributes import Attributes


class AfterDecision:
    """Looks at units while the step's own code runs behind the last of them.

    Args:
        program: of the step.
        attributes: of units.
        watch: the state that all ranks are told of.

    Example::

        decided = AfterDecision(program, attributes, watch)
        decided.begin()
        module.net[0].scale = 0.5
        decided.refuse()  # OtherStageError
    """

    def __init__(self, program: Program, attributes: Attributes, watch: Watch) -> None:
        self._program, self._attributes, self._watch = program, attributes, watch
        self._begun = False

    def begin(self) -> None:
        """The last unit has run."""
        if not self._begun:
            self._attributes.begin()
            self._begun = True

    def refuse(self) -> None:
        """The step has ended.

        Raises:
            OtherStageError: it has set something in a unit, of which other ranks don't hear.
        """
        if not self._begun:
            return
        known, told = self._watch.watched(), self._program.outer | self._program.resets
        left = {name for name in self._attributes.left_within(known) if not is_within(name, told)}
        left -= self._program.last_buffers
        if left:
            raise OtherStageError(
                f"After a decision by a value of the model, such as the loss, the step sets {min(left)!r}, which it "
                "did not when it was first run: the other ranks of the pipeline, which don't have the value, can't "
                "know of it. Do so in on_train_batch_end, where all ranks have the loss, or use "
                "TensorParallelStrategy."
            )
