"""News that must not wait for the next news."""

from __future__ import annotations

import asyncio

from peers.waiting import LatestValueSender


async def test_what_is_posted_in_the_moment_the_last_one_is_answered_goes_out_at_once() -> None:
    """Found as stalls of a second, one step in fifty: the news of a step waited until all was told again."""
    sent: list[int] = []

    async def send(peer: str, message: int) -> None:
        sent.append(message)
        if message == 1:  # runs after this task, before the callbacks of its end
            asyncio.get_running_loop().call_soon(courier.post, peer, 2)

    courier: LatestValueSender[str, int] = LatestValueSender(send)
    courier.post("peer", 1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert sent == [1, 2]
    await courier.close()


async def test_what_was_stopped_before_it_began_does_not_stop_what_is_posted_later() -> None:
    sent: list[int] = []

    async def send(peer: str, message: int) -> None:
        sent.append(message)

    courier: LatestValueSender[str, int] = LatestValueSender(send)
    courier.post("peer", 1)
    await courier.close()
    courier.post("peer", 2)
    await asyncio.sleep(0)
    assert sent == [2]
    await courier.close()


async def test_what_is_posted_meanwhile_replaces_what_waits() -> None:
    sent: list[tuple[str, int]] = []
    answered = asyncio.Event()

    async def send(peer: str, message: int) -> None:
        sent.append((peer, message))
        await answered.wait()

    courier: LatestValueSender[str, int] = LatestValueSender(send)
    for message in (1, 2, 3):
        courier.post("slow", message)
        await asyncio.sleep(0)
    courier.post("other", 4)
    await asyncio.sleep(0)
    assert sent == [("slow", 1), ("other", 4)]
    answered.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert sent[2:] == [("slow", 3)]
    await courier.close()
