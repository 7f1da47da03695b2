"""The modules that run as a whole on a stage: none may be another by the time that a step runs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_par.pipeline.plan.units import ancestors
from lightning_par.private.compiler import is_compiled_wrapper
from lightning_par.private.modules import modules_of, parameters_of


class HeldModules:
    """Those of a module, and what they are in, as they were when its stages were planned.

    Args:
        root: the module.
        units: their names. One without weights, as a loss with a buffer, may be another one later on.

    Example::

        held = HeldModules(net, ["head"])
        net.head = nn.Linear(4, 4)
        held.check()  # NotImplementedError
    """

    def __init__(self, root: nn.Module, units: Iterable[str]) -> None:
        weighted = [path for path in units if any(map(parameters_of, root.get_submodule(path).modules()))]
        self._held = []
        for path in dict.fromkeys(one for unit in weighted for one in (*ancestors(unit), unit) if one):
            parent, _, name = path.rpartition(".")
            modules = modules_of(root.get_submodule(parent))
            self._held.append((path, modules, name, modules[name]))

    def check(self) -> None:
        """Look for another one in the place of one of them: in no time, as it is asked at each step.

        Raises:
            NotImplementedError: there is one.
        """
        for path, modules, name, child in self._held:
            now = modules.get(name, child)
            if now is child:
                continue
            if now is not None and is_compiled_wrapper(now) and any(x is child for x in now.children()):
                raise NotImplementedError(
                    f"{path!r} is what torch.compile made of the module whose weights were placed on stages, since "
                    f"that was done, as in on_fit_start. Write `self.{path}.compile()` there, which compiles it in "
                    "place, or use torch.compile before, in __init__, setup or configure_model."
                )
            raise NotImplementedError(
                f"{path!r} is another module than the one whose weights were placed on stages: it was replaced since, "
                "as in on_fit_start, and what the new one holds is on no stage. Replace modules before, in __init__, "
                "setup or configure_model."
            )
