"""The modules that stages hold weights of: none may be another by the time that a step runs."""

from __future__ import annotations

from torch import nn

from lightning_par.private.modules import modules_of, parameters_of


class HeldModules:
    """Those of a module, as they were when its stages were planned.

    Example::

        held = HeldModules(net)
        net.head = nn.Linear(4, 4)
        held.check()  # NotImplementedError
    """

    def __init__(self, root: nn.Module) -> None:
        self._held = [
            (f"{path}.{name}".lstrip("."), modules_of(parent), name, child)
            for path, parent in root.named_modules()
            for name, child in modules_of(parent).items()
            if child is not None and any(map(parameters_of, child.modules()))  # others, as a loss with a buffer, may
        ]

    def check(self) -> None:
        """Look for another one in the place of one of them: in no time, as it is asked at each step.

        Raises:
            NotImplementedError: there is one.
        """
        for path, modules, name, child in self._held:
            if modules.get(name) is not child:
                raise NotImplementedError(
                    f"{path!r} is another module than the one whose weights were placed on stages: it was replaced "
                    "since, as in on_fit_start, and what the new one holds is on no stage. Replace modules before, in "
                    "__init__, setup or configure_model."
                )
