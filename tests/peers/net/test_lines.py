"""Measuring lines over which nothing passes: whom a peer probes, and what it answers."""

from __future__ import annotations

import random

import pytest

from peers.ports import PROBE_BYTES, NetworkPath
from peers.stage.path_probe import AGAIN_S, FEW, PathProber
from swarm.errors import Refused
from swarm.records import PeerRecord
from swarm.wire.messages import ProbeLine, pack
from tests.peers.network import CalmNetwork, End

pytestmark = pytest.mark.virtual_time

RUN = "run"


async def prober(network: CalmNetwork, name: str) -> tuple[PathProber, End]:
    end = network.join(name)
    await end.directory.announce(PeerRecord(peer=name, run=RUN, stage=0, state="serving", version=0))
    return PathProber(RUN, end.transport, end.directory, random.Random(1)), end


async def test_whose_line_is_known_is_not_probed() -> None:
    network = CalmNetwork()
    (mine, end), *_ = [await prober(network, name) for name in ("me", "a", "b")]
    end.transport.lines["a"] = NetworkPath(rtt_s=0.1, bandwidth_bps=1e6)
    assert mine.choose(now=0.0) == "b"
    end.transport.lines["a"] = NetworkPath(rtt_s=0.1)  # half of it is not enough
    assert {mine.choose(now=0.0) for _ in range(40)} == {"a", "b"}
    network.kill("a")
    network.expire("a")
    network.expire("b")
    assert mine.choose(now=0.0) is None, "nobody is left"


async def test_a_probe_goes_there_and_comes_back_once_small_and_once_large() -> None:
    network = CalmNetwork()
    (mine, _), (_, other) = [await prober(network, name) for name in ("me", "a")]
    await mine.probe("a")
    assert other.transport.calls["line"] == 2
    assert mine.choose(now=0.0) is None, "it was probed just now"


async def test_a_few_are_probed_and_again_after_long(monkeypatch: pytest.MonkeyPatch) -> None:
    network, now = CalmNetwork(), [0.0]
    monkeypatch.setattr("peers.stage.path_probe.now_s", lambda: now[0])
    (mine, _), *_ = [await prober(network, name) for name in ("me", *(f"p{i:02}" for i in range(FEW + 5)))]
    probed: list[str] = []
    while (peer := mine.choose(now=now[0])) is not None:
        probed.append(peer)
        await mine.probe(peer)
        now[0] += 1.0
    assert len(probed) == len(set(probed)) == FEW
    assert mine.choose(now=AGAIN_S - 1.0) is None
    assert mine.choose(now=AGAIN_S) == probed[0]


async def test_who_does_not_answer_is_left_alone() -> None:
    network = CalmNetwork()
    (mine, _), _ = [await prober(network, name) for name in ("me", "a")]
    network.kill("a")
    await mine.probe("a")
    assert mine.choose(now=0.0) is None


async def test_a_probe_of_another_run_or_of_many_parts_or_too_large_is_refused() -> None:
    network = CalmNetwork()
    await prober(network, "a")
    client = network.join("client").transport
    for run, body, text in (
        ("other", [b"x"], "this peer serves run run, not 'other'"),
        (RUN, [b"x", b"y"], "a probe of 2 parts; one is sent back"),
        (RUN, [bytes(PROBE_BYTES + 1)], f"a body of {PROBE_BYTES + 1} bytes; 'line' takes {PROBE_BYTES}"),
    ):
        with pytest.raises(Refused) as refused:
            await client.call("a", "line", pack(ProbeLine(run=run)), body, max_answer_bytes=PROBE_BYTES)
        assert text in refused.value.text
    answer = await client.call(
        "a", "line", pack(ProbeLine(run=RUN)), [b"there"], max_answer_bytes=PROBE_BYTES
    )
    assert [bytes(part) for part in answer.body] == [b"there"]
