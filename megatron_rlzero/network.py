"""Addresses of this machine."""

from __future__ import annotations

import socket

import psutil

LOOPBACK = "127.0.0.1"


def address(interface: str) -> str:
    """This machine's IPv4 address on a network interface.

    Raises:
        ValueError: there is none; names those that have one.
    """
    found = {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    if interface not in found:
        raise ValueError(f"this machine has no interface {interface!r} with an IPv4 address; it has {sorted(found)}")
    return found[interface]
