"""Messages too large for a header are said in bodies, and those who coordinate nothing say none."""

from __future__ import annotations

import msgspec
import pytest

from peers.stage import coordination
from peers.transfer import server
from swarm.errors import NotNow, Refused
from swarm.protocol.messages import Directive, ReplicaReport, RunStatus, StageSummary
from swarm.wire.messages import MAX_LONG_BYTES, Saved, Watched, pack
from tests.peers.liars.test_attack import member
from tests.peers.loops import swarm

pytestmark = pytest.mark.virtual_time


def say_in_bodies(message: msgspec.Struct) -> tuple[bytes, tuple[bytes, ...]]:
    kinds = Directive | RunStatus | ReplicaReport | StageSummary | Watched | Saved
    may_be_long = isinstance(message, kinds)
    return (b"", (pack(message),)) if may_be_long else (pack(message), ())


async def test_a_run_whose_messages_are_all_long_ends_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (coordination, server):
        monkeypatch.setattr(module, "say", say_in_bodies)
    async with swarm(stages=2, replicas=2) as s:
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()


@pytest.mark.parametrize(("method", "stage"), [("directive", 1), ("run", 0)])
async def test_a_long_message_of_one_who_coordinates_nothing_is_not_received(method: str, stage: int) -> None:
    async with swarm(stages=2) as s:
        await s.until_serving()
        liar = await member(s, 1)
        text = f"this peer takes no long message of yours: you do not coordinate stage {stage}"
        with pytest.raises(Refused, match=text):
            await liar.end.transport.call("s1p0", method, b"", [bytes(MAX_LONG_BYTES)])
        with pytest.raises(Refused, match=f"a body of {MAX_LONG_BYTES + 1} bytes"):
            await liar.end.transport.call("s1p0", method, b"", [bytes(MAX_LONG_BYTES + 1)])
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()


@pytest.mark.parametrize("method", ["report", "summary"])
async def test_a_long_message_of_one_who_serves_no_stage_is_not_received(method: str) -> None:
    async with swarm(stages=2) as s:
        await s.until_serving()
        stranger = s.add_stranger("stranger").end.transport
        with pytest.raises(NotNow, match="is not announced at stage 0"):
            await stranger.call("s0p0", method, b"", [bytes(MAX_LONG_BYTES)])
        with pytest.raises(Refused, match="a body of"):
            await stranger.call("s0p0", method, b"", [bytes(2 * MAX_LONG_BYTES)])
