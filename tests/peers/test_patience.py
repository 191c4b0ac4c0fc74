"""A peer that shows signs of life and never answers."""

from __future__ import annotations

import asyncio

import pytest

from peers.ports import Answer, Request
from tests.peers.loops import swarm

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_peer_that_never_answers_is_given_up_and_its_work_done_by_others(stage: int) -> None:
    async with swarm() as s:
        stuck = s.network.peers[f"s{stage}p1"].transport

        async def never(request: Request) -> Answer:
            await request.accept()
            return await asyncio.get_running_loop().create_future()

        stuck.serve("work", never, max_body_bytes=1 << 20)
        s.add_trainer("trainer")
        await s.until_version(s.run.steps, limit_s=5000.0)
        assert all((counts == s.run.steps).all() for counts in s.count_matrix().values())
