"""Tests marked `virtual_time` wait for nothing: their loop moves its clock instead, and runs no threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from peers.sim.loop import VirtualLoop
from swarm.manifest import tables


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    virtual = item.get_closest_marker("virtual_time") is not None
    return {"virtual": VirtualLoop} if virtual else {"asyncio": asyncio.new_event_loop}


@pytest.fixture
def summed_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a meeting of few islands, too, each adds up a part."""
    monkeypatch.setattr(tables, "SUMMED_FROM", 2)
