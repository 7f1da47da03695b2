"""LightningModules as users write them, none of which knows about parallelism: the rows of the equality test.

`MODELS` maps a name to a `Case`. All are tiny: four float64 training steps take a fraction of a second on one core. A
new case is one line in the table at the end of its family's file, plus a module where the ones there don't cover it.
"""

from __future__ import annotations

from tests.helpers.models import (
    convolutional,
    dense,
    drawing,
    experts,
    gpt,
    hugging_face,
    recurrent,
    steps,
    transformers,
)
from tests.helpers.models.case import Case

_FAMILIES = (gpt, dense, steps, experts, transformers, recurrent, convolutional, hugging_face)
MODELS: dict[str, Case] = {name: case for family in _FAMILIES for name, case in family.ROWS.items()}

DRAWING: dict[str, Case] = drawing.ROWS
"""Those whose steps draw, so that they are one device's under ``draws="one_device"`` alone."""
