"""The parts of hivemind that we use, without the rest: p2pd's messages, the DHT's routing table, addresses.

`import hivemind` executes `hivemind/__init__.py`, which pulls in torch, the experts, the optimizers
and gRPC: 2.3 s and 240 MB (measured on 2 cores, hivemind 1.1.12). What we use needs none of that: 0.11 s
and 25 MB. So the packages whose `__init__` only re-exports are registered as bare modules with the right path
before their submodules are imported, and given the few names that those submodules take from them; unless
another part of the process has imported hivemind already.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from typing import Any

from peers.net.p2pd import hivemind_folder

# What hivemind.dht.routing imports from packages, and the modules that have it.
_NAMES = {
    ("hivemind.utils", "MSGPackSerializer"): "hivemind.utils.serializer",
    ("hivemind.utils", "get_dht_time"): "hivemind.utils.timed_storage",
    ("hivemind.utils", "get_logger"): "hivemind.utils.logging",
    ("hivemind.p2p", "PeerID"): "hivemind.p2p.p2p_daemon_bindings.datastructures",
}


def _register_bare_packages() -> None:
    """Put the bare packages into sys.modules."""
    root = hivemind_folder()
    if root is None:
        raise ImportError("hivemind is not installed")
    for name in ("hivemind", "hivemind.utils", "hivemind.dht", "hivemind.p2p"):
        spec = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        spec.submodule_search_locations = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    for (package, name), module in _NAMES.items():
        setattr(sys.modules[package], name, getattr(importlib.import_module(module), name))


if "hivemind" not in sys.modules:
    _register_bare_packages()

from hivemind.dht.routing import DHTID, RoutingTable  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402

p2pd_pb2: Any = importlib.import_module("hivemind.proto.p2pd_pb2")
"""p2pd's protobuf messages; generated, without types."""

__all__ = ["DHTID", "Multiaddr", "RoutingTable", "p2pd_pb2"]
