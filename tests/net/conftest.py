"""Event loops of the network's tests.

Programs use uvloop where it is installed, asyncio elsewhere. What handles sockets is tested on both; what
starts p2pd, which takes its time, on uvloop, and a few of them (`both_loops`) on both. Tests marked
`virtual_time` wait for nothing: their loop moves its clock instead.

Of a pair of peers every loop and every path is tested, and not every path on every loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.net.directory.memory_dht import MachinesLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual_time") is not None:
        return {"virtual": MachinesLoop}
    factories = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    if item.get_closest_marker("net") is not None and item.get_closest_marker("both_loops") is None:
        del factories["asyncio"]
    return factories


PATHS_OF = {"asyncio": ("p2pd",), "uvloop": ("direct", "memory")}
"""Which paths a `pair` of peers takes on each loop."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def superfluous(item: pytest.Item) -> bool:
        path = getattr(getattr(item, "callspec", None), "params", {}).get("pair")
        loop = next((name for name in PATHS_OF if f"[{name}-" in item.name), None)
        return path is not None and loop is not None and path not in PATHS_OF[loop]

    config.hook.pytest_deselected(items=[item for item in items if superfluous(item)])
    items[:] = [item for item in items if not superfluous(item)]
