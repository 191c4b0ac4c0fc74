"""The parts of hivemind that we use, imported without the rest of it.

`import hivemind` executes `hivemind/__init__.py`, which pulls in torch, the experts, the optimizers
and gRPC: 2.3 s and 240 MB (measured on 2 cores, hivemind 1.1.12). The peer-to-peer client and the
DHT node need none of that: 0.11 s and 41 MB. So three packages whose `__init__` only re-exports
(`hivemind`, `hivemind.utils`, `hivemind.dht`) are registered as bare modules with the right path
before their submodules are imported, and `hivemind.utils` is given the few light names that those
submodules take from it. If another part of the process has imported hivemind already, or if a
future version needs more than these names, the ordinary import is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

from peers.net.p2pd import hivemind_folder

# What hivemind.p2p and hivemind.dht import from hivemind.utils; none of it needs torch.
_LIGHT_NAMES = {
    "logging": ("get_logger",),
    "serializer": ("MSGPackSerializer", "SerializerBase"),
    "timed_storage": (
        "DHTExpiration",
        "MAX_DHT_TIME_DISCREPANCY_SECONDS",
        "TimedStorage",
        "ValueWithExpiration",
        "get_dht_time",
    ),
}


def _register_bare_packages() -> None:
    """Put the three bare packages into sys.modules."""
    root = hivemind_folder()
    if root is None:
        raise ImportError("hivemind is not installed")
    for name in ("hivemind", "hivemind.utils", "hivemind.dht"):
        spec = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        spec.submodule_search_locations = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    package = sys.modules["hivemind"]
    for name in ("utils", "dht"):
        setattr(package, name, sys.modules[f"hivemind.{name}"])
    utils = sys.modules["hivemind.utils"]
    for submodule, names in _LIGHT_NAMES.items():
        loaded = importlib.import_module(f"hivemind.utils.{submodule}")
        for name in names:
            setattr(utils, name, getattr(loaded, name))


def _prepare() -> None:
    # hivemind reads its log level from the environment at import; what strangers do to a DHT node
    # (and it logs) is no news to the user. Our own messages say what matters.
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    if "hivemind" in sys.modules:
        return
    before = set(sys.modules)
    try:
        _register_bare_packages()
        importlib.import_module("hivemind.p2p")
        importlib.import_module("hivemind.dht.node")
    except Exception:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "hivemind":
                del sys.modules[name]
        logging.getLogger(__name__).debug(
            "light import of hivemind failed; importing all of it", exc_info=True
        )


_prepare()

import hivemind.dht.node as _node_module  # noqa: E402
import hivemind.dht.protocol as _protocol_module  # noqa: E402
import hivemind.dht.traverse as _traverse_module  # noqa: E402
import hivemind.p2p.p2p_daemon as _daemon_module  # noqa: E402
import hivemind.p2p.p2p_daemon_bindings.control as _control_module  # noqa: E402
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase  # noqa: E402
from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.protocol import DHTProtocol  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.p2p.p2p_daemon import P2P, P2PContext  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client  # noqa: E402
from hivemind.proto import dht_pb2  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402
from hivemind.utils.timed_storage import get_dht_time  # noqa: E402

p2pd_pb2: Any = importlib.import_module("hivemind.proto.p2pd_pb2")
"""p2pd's protobuf messages; generated, without types."""


class TaskKeeper:
    """Holds the tasks that hivemind starts and forgets, so that they can be ended.

    hivemind's DHT calls `asyncio.create_task` in a dozen places without keeping the task: such a task may be
    collected while it runs, and outlives the node that it belongs to ("Task was destroyed but it is
    pending"). Within `with keeper.keeping():`, and in all tasks started from there, they are kept here.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        token = _keeper.set(self)
        try:
            yield
        finally:
            _keeper.reset(token)

    def create_task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: nobody awaits most of them

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel the tasks, and those that they start meanwhile, until none is left."""
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


_keeper: contextvars.ContextVar[TaskKeeper | None] = contextvars.ContextVar("task_keeper", default=None)


def create_task(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """As `asyncio.create_task`, held by the `TaskKeeper` of this context if there is one."""
    keeper = _keeper.get()
    return keeper.create_task(coroutine) if keeper is not None else asyncio.create_task(coroutine)


class _KeepingAsyncio:
    """Stands in for the module `asyncio` inside hivemind's modules; only `create_task` differs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    create_task = staticmethod(create_task)


for _module in (_node_module, _protocol_module, _traverse_module, _daemon_module, _control_module):
    _module.asyncio = _KeepingAsyncio()  # type: ignore[attr-defined]


def use_protocol(protocol: type[DHTProtocol]) -> None:
    """Let DHTNode build this subclass. Its methods keep their names on the wire."""
    protocol.__name__ = DHTProtocol.__name__
    _node_module.DHTProtocol = protocol  # type: ignore[misc]


__all__ = [
    "DHTID",
    "P2P",
    "Client",
    "ControlClient",
    "DHTNode",
    "DHTProtocol",
    "DHTRecord",
    "DaemonConnector",
    "Multiaddr",
    "P2PContext",
    "PeerID",
    "RecordValidatorBase",
    "TaskKeeper",
    "create_task",
    "dht_pb2",
    "get_dht_time",
    "p2pd_pb2",
    "use_protocol",
]
