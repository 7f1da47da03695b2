"""Which interfaces gloo and NCCL are told of, and what is said where there is no such one."""

from __future__ import annotations

import socket

import pytest

from lightning_par.mesh.interfaces import (
    address_towards,
    addresses,
    gloo_address,
    interface_of,
    is_loopback,
    wrong_interface,
)


def test_addresses_are_those_of_this_host() -> None:
    known = addresses()
    assert "127.0.0.1" in known["lo"] and interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.77") is None
    assert set(known) == {name for _, name in socket.if_nameindex()}
    assert address_towards("127.0.0.1", 80) == "127.0.0.1"
    assert is_loopback("::1") and is_loopback("127.0.1.1") and not is_loopback("fe80::1%eth0")


def test_gloo_listens_where_its_variable_says_or_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert gloo_address() in {address for own in addresses().values() for address in own} | {"127.0.1.1"}
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert gloo_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert gloo_address() == "127.0.0.1"


@pytest.mark.parametrize(
    ("variable", "value", "backend", "wrong"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", "gloo", False),
        ("GLOO_SOCKET_IFNAME", "lo,eth77", "gloo", True),
        ("GLOO_SOCKET_IFNAME", "eth77", "nccl", True),  # what hosts tell each other goes by gloo, too
        ("NCCL_SOCKET_IFNAME", "eth77", "gloo", False),
        ("NCCL_SOCKET_IFNAME", "eth77", "nccl", True),
        ("NCCL_SOCKET_IFNAME", "=l", "nccl", True),
        ("NCCL_SOCKET_IFNAME", "=lo", "nccl", False),
        ("NCCL_SOCKET_IFNAME", "eth77,l", "cpu:gloo,cuda:nccl", False),
        ("NCCL_SOCKET_IFNAME", "^docker", "nccl", False),
        ("NCCL_SOCKET_IFNAME", "^=docker", "nccl", False),
    ],
)
def test_an_interface_that_is_not_there_is_found_before_ranks_connect(
    variable: str, value: str, backend: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv(variable, value)
    found = wrong_interface(backend)
    assert (found is not None) == wrong
    assert found is None or f"{variable}={value!r}" in found and f"{variable}=" in found.split(value)[1]


def test_all_interfaces_but_those_there_are_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^" + ",".join(addresses()))
    assert "leaves NCCL no interface" in (wrong_interface("nccl") or "")
