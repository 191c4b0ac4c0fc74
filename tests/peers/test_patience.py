"""A peer that shows signs of life and never answers."""

from __future__ import annotations

import asyncio

import pytest

from peers.ports import Answer, Request
from swarm.policy import patience
from tests.peers.loops import swarm


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_peer_that_never_answers_is_given_up_and_its_work_done_by_others(
    monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setattr(patience, "UNKNOWN_S", 1.0)
    monkeypatch.setattr(patience, "LEAST_S", 1.0)
    monkeypatch.setattr(patience, "TIMES_USUAL", 5.0)
    async with swarm() as s:
        stuck = s.network.peers[f"s{stage}p1"].transport

        async def never(request: Request) -> Answer:
            await request.accept()
            return await asyncio.get_running_loop().create_future()

        stuck.serve("work", never, max_body_bytes=1 << 20)
        s.add_trainer("trainer")
        await s.until_version(s.run.steps, limit_s=100.0)
        assert all((counts == s.run.steps).all() for counts in s.count_matrix().values())
