"""The tensor without memory that stands for one which is elsewhere, on a disk, or not made yet."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from lightning_par.private.tensors import make_wrapper_subclass, no_torch_function
from lightning_par.sharded.user_classes import put_on, users_class

ASKED = "_memory_asked_for"
"""The attribute of a tensor by which what was brought for it is found again."""


class AbsentTensor(torch.Tensor):
    """It has shape, dtype and device, and one slot of facts: what is known of the values in place of these.

    Subclasses say in ``__torch_dispatch__`` what becomes of what is done to it, in `_made_anew` what a copy is, and
    in the methods of `torch.Tensor` that modes would see, were they not defined there, what reading its values does.
    """

    _facts: Any
    _users_class: Any = None  # see `lightning_par.sharded.user_classes`

    __torch_function__ = no_torch_function

    @classmethod
    def _standing(
        cls, facts: Any, shape: Iterable[int], dtype: torch.dtype, device: torch.device, **geometry: Any
    ) -> Any:
        """One of the class with these ``facts``.

        Args:
            facts: what is known of it.
            shape: its shape.
            dtype: its dtype.
            device: where it would be.
            geometry: strides and offset, where they are not plain, and ``requires_grad``.
        """
        self = make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device, **geometry)
        self._facts = facts
        return self

    def _made_anew(self, memo: dict[int, Any]) -> AbsentTensor:
        """Another one of the same values, in memory of its own, without what the user hung on this one."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = copied = self._made_anew(memo)
            attributes = {key: value for key, value in vars(self).items() if key not in ("_facts", ASKED)}
            put_on(copied, users_class(self))
            vars(copied).update(copy.deepcopy(attributes, memo))
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"
