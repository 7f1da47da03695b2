"""What `torch.cuda` says, made up: fake devices are there, and what waits for them is told to `waits`.

What tensors do is `fakecuda.cpp`'s. Kernels run at once, in the host's own thread: streams and events are only counted.
torch's private names are used, as this stands in for a part of torch.
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.gpu_rules import attention, batch_norm, cells, kernels, waits
from tests.gpu_rules.build import extension

used: Counter[str] = Counter()
"""How often streams and events were used, by what was done."""

_PROPERTIES = types.SimpleNamespace(
    name="fake", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, is_integrated=False, uuid="0",
    gcnArchName="", L2_cache_size=50 << 20, warp_size=32, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448,
)  # fmt: skip


class Stream(torch.Stream):
    """A stream of a fake device; which is current is known to autograd, as that of CUDA is."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def synchronize(self) -> None:
        waits.tell("wait", "stream.synchronize")

    def wait_stream(self, other: Any) -> None:
        used["wait_stream"] += 1

    def wait_event(self, event: Any) -> None:
        used["wait_event"] += 1

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True


class Event:
    """An event of a fake device: it has come as soon as it is recorded."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        used["record"] += 1

    def wait(self, stream: Any = None) -> None:
        used["wait_event"] += 1

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        waits.tell("wait", "event.synchronize")


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return extension().get_device() if index is None else index


def _numbered(device: Any, number: int) -> Stream:
    return Stream(stream_id=number, device_index=_index(device), device_type=1)


def _current_stream(device: Any = None) -> Stream:
    return _numbered(device, extension().get_stream(_index(device)))


def _set_stream(stream: Any) -> None:
    if stream is not None:
        extension().set_stream(stream.device_index, stream.stream_id)


@contextlib.contextmanager
def _stream(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    device, outer = extension().get_device(), _current_stream(stream.device)
    extension().set_device(stream.device_index)
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(outer)
        extension().set_device(device)


def install() -> None:
    """To be called before anything asks for CUDA."""
    fake = extension()
    _install_bindings(fake)
    made = _functions(fake)
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
        for name, value in made.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    torch.backends.cuda.is_built = lambda: True
    fake.listen(waits.tell)
    attention.install()
    batch_norm.install()
    cells.install()
    kernels.install()
    _install_storages(fake)


def _synchronize(device: Any = None) -> None:
    """All that was issued must be able to end, as the messages of this rank, for which a device would wait too."""
    from tests.gpu_rules.queues import synchronize

    waits.tell("wait", "cuda.synchronize")
    synchronize()


def _install_bindings(fake: Any) -> None:
    bindings: dict[str, Callable[..., Any]] = dict(
        _cuda_getDeviceCount=fake.device_count,
        _cuda_getDevice=fake.get_device,
        _cuda_setDevice=lambda device: fake.set_device(int(device)),
        _cuda_exchangeDevice=fake.exchange_device,
        _cuda_maybeExchangeDevice=fake.exchange_device,
        _cuda_synchronize=lambda *_: _synchronize(),
        _cuda_isCurrentStreamCapturing=lambda: False,
        _cuda_clearCublasWorkspaces=lambda: None,
        _cuda_getCurrentRawStream=lambda *_: 0,
        _nccl_version=lambda: 2 << 32 | 27 << 16 | 5,  # asked for what c10d logs of an error
        _nccl_version_suffix=lambda: b"",
    )
    for name, value in bindings.items():
        setattr(torch._C, name, value)


def _functions(fake: Any) -> dict[str, Any]:
    count = fake.device_count()
    found: dict[str, Any] = dict(
        _exchange_device=fake.exchange_device,
        _maybe_exchange_device=lambda device: fake.exchange_device(device),  # to dynamo, a function of its own
        _initialized=True,
        _is_compiled=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_call=lambda call, **_: call(),
        _lazy_init=lambda: None,
        current_device=fake.get_device,
        current_stream=_current_stream,
        default_generators=tuple(fake.generator(i) for i in range(count)),
        default_stream=lambda device=None: _numbered(device, 0),
        device_count=lambda: count,
        empty_cache=lambda: None,
        Event=Event,
        get_device_capability=lambda device=None: (9, 0),
        get_device_name=lambda device=None: "fake",
        get_device_properties=lambda device=None: _PROPERTIES,
        ipc_collect=lambda: None,
        is_available=lambda: True,
        is_bf16_supported=lambda *_, **__: True,
        is_current_stream_capturing=lambda: False,
        is_initialized=lambda: True,
        mem_get_info=lambda device=None: (80 << 30, 80 << 30),
        memory_stats=lambda device=None: OrderedDict(),
        set_device=lambda device: fake.set_device(_index(device)),
        set_stream=_set_stream,
        Stream=Stream,
        stream=_stream,
        synchronize=_synchronize,
    )
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        found[name] = lambda device=None: 0
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats"):
        found[name] = lambda device=None: None
    return found


def _install_storages(fake: Any) -> None:
    """What a CPU build lacks: storages made on CUDA, as ``torch.load`` does, and resized there."""
    storage: Any = torch.UntypedStorage
    resize, new = storage.resize_, storage.__new__

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        fake.resize_storage(self, size)
        return self

    def made(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        there = None if device is None else torch.device(device)
        if there is None or there.type != "cuda":
            return new(cls, *args, **kwargs, **({} if device is None else {"device": device}))
        size, content = (args[0], None) if args and isinstance(args[0], int) else (len(args[0]) if args else 0, args)
        x = torch.empty(size, dtype=torch.uint8, device=there)
        if content:
            x.copy_(torch.tensor(list(content[0]), dtype=torch.uint8))
        return x.untyped_storage()

    storage.resize_, storage.__new__ = resize_, made
