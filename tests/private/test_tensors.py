"""What a tensor is made of, beside its memory."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_par.private.tensors import (
    GRADIENT,
    PARAMETER_MARK,
    as_class,
    counter_of,
    get_data,
    is_held,
    is_marked,
    is_referred,
    is_view,
    make_wrapper_subclass,
    mark_parameter,
    no_torch_function,
    set_data,
    stored_values,
    view_base,
    with_node,
    write_count,
)


class Wrapper(torch.Tensor):
    met: ClassVar[list[Any]] = []
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, *shape: int) -> Wrapper:
        return make_wrapper_subclass(cls, shape, dtype=torch.float64, device="cpu", requires_grad=True)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.met.append(func)
        return args[0]


def test_a_tensor_without_memory_meets_operations_alone() -> None:
    x = Wrapper(2, 3)
    assert x.shape == (2, 3) and x.dtype == torch.float64 and x.requires_grad
    with pytest.raises(RuntimeError, match="data pointer"):
        x.untyped_storage().data_ptr()
    Wrapper.met.clear()
    with torch.no_grad():
        assert type(x.exp()) is Wrapper and Wrapper.met == [torch.ops.aten.exp.default]


def test_writes_are_counted_for_all_views() -> None:
    x = torch.zeros(2, 2)
    before = write_count(x)
    x[0].add_(1)
    assert write_count(x) == write_count(x[1]) == before + 1
    with torch.inference_mode(), pytest.raises(RuntimeError, match="[Ii]nference"):
        write_count(torch.ones(1))


def test_a_view_leads_to_its_base() -> None:
    x = torch.zeros(2, 2)
    assert view_base(x[0].t()) is x and view_base(x) is None
    assert is_view(x[0]) and not is_view(x)


@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3), (4, 1)])
def test_a_leaf_with_a_node_may_be_written_into(shape: tuple[int, ...]) -> None:
    leaf = torch.rand(shape, dtype=torch.float64).requires_grad_()
    if leaf.ndim:
        leaf = leaf.detach().transpose(0, 1).requires_grad_()
    x = with_node(leaf)
    assert x.data_ptr() == leaf.data_ptr() and x.is_contiguous() == leaf.is_contiguous()
    assert not x.is_leaf and not is_view(x)
    x.mul_(3)
    x.sum().backward()
    assert leaf.grad is not None and (leaf.grad == 3).all()


def test_a_marked_tensor_is_a_parameter() -> None:
    x = Wrapper(1)
    assert not is_marked(x) and not isinstance(x, nn.Parameter)
    mark_parameter(x)
    assert is_marked(x) and isinstance(x, nn.Parameter) and vars(x) == {PARAMETER_MARK: True}
    mark_parameter(x, False)
    assert not is_marked(x) and not isinstance(x, nn.Parameter)


def test_a_tensor_that_is_referred_to_is_held() -> None:
    x = torch.ones(1)
    assert not is_held(x)
    reference = weakref.ref(x)
    assert is_held(x)
    del reference
    y = torch.ones(1, requires_grad=True)
    made = y.exp()
    assert not is_held(torch.ones(1)) and is_held(y) and made.requires_grad


def test_a_base_is_referred_to_by_its_views() -> None:
    x = torch.ones(2)
    assert not is_referred(x)
    view = x[:1]
    assert is_referred(x)
    del view
    reference = weakref.ref(x)
    assert not is_referred(x) and reference() is x


def test_an_assignment_of_data_is_met_as_its_setter() -> None:
    met: list[Any] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            met.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(1)
    with Functions():
        x.data = torch.zeros(1)
    assert met[-1] == set_data and x == 0


def test_a_look_at_a_gradient_is_met_as_its_descriptors() -> None:
    met: list[Any] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            met.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(1, requires_grad=True)
    with Functions():
        x.grad = torch.ones(1)
        assert x.grad == 1
    assert GRADIENT.__set__ in met and GRADIENT.__get__ in met and GRADIENT.__get__(x) is x.grad


def test_data_has_the_memory_and_a_version_of_its_own() -> None:
    x = torch.zeros(3)
    part = get_data(x[:2])
    part.add_(1)
    assert x.tolist() == [1, 1, 0] and (write_count(x), write_count(part)) == (0, 1) and not is_view(part)


def test_a_counter_has_the_version_of_a_tensor_and_not_its_memory() -> None:
    x = torch.zeros(3)
    counter, freed = counter_of(x), weakref.ref(x.untyped_storage())
    x[:1].add_(1)
    assert write_count(counter) == write_count(x) == 1 and counter.numel() == 0
    x.data.add_(1)
    assert write_count(counter) == 1
    del x
    assert freed() is None


def test_a_class_is_given_whatever_replaces_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(torch.Tensor):
        pass

    monkeypatch.setattr(torch.Tensor, "as_subclass", None)
    x = torch.ones(2, requires_grad=True)
    own = as_class(x, Own)
    assert type(own) is Own and own.data_ptr() == x.data_ptr() and own.requires_grad
    assert type(as_class(own, torch.Tensor)) is torch.Tensor


def test_a_sparse_tensor_stores_so_many_values() -> None:
    x = torch.eye(3)
    assert stored_values(x) is None and stored_values(3) is None
    assert stored_values(x.to_sparse()) == stored_values(x.to_sparse_csr()) == 3
