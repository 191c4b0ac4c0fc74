"""Who asks whether it can be dialled has p2pd asked for all its connections: seldom, whoever it is."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from peers.net.identity import Identity
from peers.net.nat import MAX_PER_HOST, AskReach, DialBack
from swarm.errors import Busy
from swarm.wire.messages import pack

pytestmark = pytest.mark.virtual_time


class Connected:
    """What a `DialBack` uses of p2pd's control: all are connected from one host, and none is dialled."""

    asked = 0

    async def connections(self) -> dict[str, list[str]]:
        self.asked += 1
        return {name: ["/ip4/44.1.1.1/tcp/5"] for name in ("liar", "other")}


@pytest.mark.parametrize(
    ("askers", "most"), [(("liar",), MAX_PER_HOST), (("liar", "other"), 2 * MAX_PER_HOST)]
)
async def test_who_asks_without_end_has_p2pd_asked_so_often_and_no_more(
    askers: tuple[str, ...], most: int
) -> None:
    control = Connected()
    server = DialBack(control, list, lambda: False, lambda: ["/ip4/44.2.2.2/tcp/1"])  # type: ignore[arg-type]
    question = pack(AskReach(peer=Identity(bytes(32)).peer_id, port=0))
    for _ in range(10 * MAX_PER_HOST):
        for peer in askers:
            with contextlib.suppress(Busy):
                await server.serve(SimpleNamespace(header=question, peer=peer))  # type: ignore[arg-type]
    assert control.asked == most
