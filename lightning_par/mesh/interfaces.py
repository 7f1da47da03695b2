"""Addresses of this host, and by which of them gloo would have other hosts reach it.

gloo listens at the address of ``GLOO_SOCKET_IFNAME``, else at one that the host's own name resolves to, else at the
loopback address. Where the name stands for the loopback address, as Debian's /etc/hosts has it, other hosts are told to
connect to themselves, and wait there for as long as the process group's timeout.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_IPV6 = "/proc/net/if_inet6"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def addresses() -> dict[str, list[str]]:
    """The addresses of each interface of this host, by its name; none where the system does not tell.

    Example::

        assert "lo" in addresses()  # on Linux
    """
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name, address in (*_of_version_4([*found]), *_of_version_6()):
        found.setdefault(name, []).append(address)
    return found


def _of_version_4(names: list[str]) -> Iterator[tuple[str, str]]:
    try:
        from fcntl import ioctl
    except ImportError:  # Windows
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name in names:
            with suppress(OSError):  # it has none
                answer = ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])


def _of_version_6() -> Iterator[tuple[str, str]]:
    with suppress(OSError), open(_IPV6) as file:
        for line in file:
            digits, *_, name = line.split()
            yield name, str(ipaddress.IPv6Address(int(digits, 16)))


def wrong_interface(backend: str) -> str | None:
    """What is wrong with the interfaces that the environment names for gloo, and for NCCL where that is in ``backend``.

    Example::

        os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
        assert "eth7" in wrong_interface("gloo")
    """
    known = addresses()
    for name in filter(None, os.environ.get(GLOO, "").split(",")):
        if name not in known:
            return f"{GLOO}={os.environ[GLOO]!r} names no interface of this host. {_advice(GLOO, known)}"
        if not known[name]:
            return f"{GLOO}={os.environ[GLOO]!r} names an interface without an address. {_advice(GLOO, known)}"
    asked = os.environ.get(NCCL, "")
    if "nccl" in backend and asked and not any(_chosen_by_nccl(asked, name) for name in known):
        return f"{NCCL}={asked!r} leaves NCCL no interface of this host. {_advice(NCCL, known)}"
    return None


def _chosen_by_nccl(asked: str, name: str) -> bool:
    """Whether NCCL takes the interface: ``eth,ib`` begin names, ``=eth0`` is a name, ``^docker`` is all others."""
    mark = asked[0] if asked[0] in "^=" else ""
    exact = "=" in asked[: 2 if mark == "^" else 1]
    names = asked.lstrip("^=").split(",")
    is_named = name in names if exact else name.startswith(tuple(names))
    return is_named != (mark == "^")


def _advice(variable: str, known: dict[str, list[str]]) -> str:
    usable = {name: own for name, own in known.items() if own and not all(map(is_loopback, own))}
    if not usable:
        return f"Unset {variable}: there is no network here but the loopback interface."
    there = ", ".join(f"{name} ({own[0]})" for name, own in usable.items())
    return f"Write {variable}={next(iter(usable))}, or unset it; here are: {there}."


def gloo_address() -> str:
    """The address at which gloo listens for other ranks.

    Example::

        assert is_loopback(gloo_address()) or gloo_address() in [a for own in addresses().values() for a in own]
    """
    known = addresses()
    for name in filter(None, os.environ.get(GLOO, "").split(",")):
        if known.get(name):
            return known[name][0]
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"


def address_towards(host: str, port: int) -> str:
    """This host's address on the way to another.

    Raises:
        OSError: the name can't be resolved, or no way leads there.

    Example::

        assert address_towards("127.0.0.1", 29500) == "127.0.0.1"
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of datagrams: nothing is sent
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface that has ``address``.

    Example::

        assert interface_of("127.0.0.1") == "lo"
    """
    return next((name for name, own in addresses().items() if address in own), None)


def is_loopback(address: str) -> bool:
    """Whether ``address`` means the host that says it.

    Example::

        assert is_loopback("127.0.0.1") and not is_loopback("10.0.0.1")
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
