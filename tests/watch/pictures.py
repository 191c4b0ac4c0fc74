"""Pictures of made-up runs, for the tests of all faces."""

from __future__ import annotations

from dataclasses import replace

from swarm.manifest import BatchSpec, Run, demo_run
from swarm.monitoring.aggregator import Aggregator
from swarm.monitoring.health import Observation, SwarmHealth
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import LedgerCounts, LinkStatus, PastStep, PeerStatus

RUN = replace(demo_run(stages=3, steps=40), batch=BatchSpec(microbatch_size=4, microbatches_per_step=16))
START = 1_000_000.0


def record(peer: str, stage: int, *, speed: float = 2.0, run: Run = RUN) -> PeerRecord:
    state = "keeping" if stage == NO_STAGE else "serving"
    return PeerRecord(
        peer=peer, run=run.id, stage=stage, state=state, version=3, since=START - 90, speed=speed, load=1.25,
        device="cpu",
    )  # fmt: skip


def status(
    peer: str, stage: int, version: int, *, to: tuple[str, ...] = (), speed: float = 2.0
) -> PeerStatus:
    links = tuple(LinkStatus(peer=other, bytes_in=1000 * version, bytes_out=1000 * version) for other in to)
    return PeerStatus(
        peer=peer, stage=stage, version=version, state="serving", device="cpu", done=5, inflight=2,
        max_inflight=8, speed=speed, computed=20 * version, coordinator="", audit=LedgerCounts(),
        since=START - 90,
        past=(PastStep(version=version, took_s=2.0, loss=5.0 - version / 10),), links=links,
        trainers=("trainer",) if stage == 0 else (),
    )  # fmt: skip


def troubled() -> tuple[Aggregator, float]:
    """Three stages of two peers and a keeper; one died, one is slow, one lies. When, too."""
    aggregator = Aggregator(RUN)
    records = [record(f"peer-{name}", i // 2) for i, name in enumerate("abcdef")]
    records += [record("keeper", NO_STAGE, speed=0.0)]
    refused = {"a record with a wrong signature": 2}
    aggregator.observe(Observation(at=START, records=tuple(records), refused=refused))
    at = START
    for version in range(1, 13):
        at = START + 2.0 * version
        told = [
            status("peer-a", 0, version, to=("trainer", "peer-c", "peer-d")),
            status("peer-b", 0, version, to=("trainer", "peer-c")),
            status("peer-c", 1, version, to=("peer-e",), speed=0.25),
            status("peer-d", 1, version),
            status("peer-e", 2, 40 if version == 12 else version),
        ]
        silent = {"peer-f": "the connection broke"} if version > 6 else {}
        if not silent:
            told.append(status("peer-f", 2, version))
        aggregator.observe(Observation(at=at, statuses=tuple(told), silent=silent))
    return aggregator, at


def crowd(peers: int = 500, stages: int = 8) -> SwarmHealth:
    """Many peers, with traffic between neighbours."""
    run = demo_run(stages=stages, steps=1000)
    names = [f"12D3KooW{i:044d}" for i in range(peers)]
    aggregator = Aggregator(run)
    aggregator.observe(
        Observation(
            at=START, records=tuple(record(name, i % stages, run=run) for i, name in enumerate(names))
        )
    )
    for version in (1, 2, 3):
        told = tuple(
            status(name, i % stages, version, to=tuple(names[(i + 1 + 8 * k) % peers] for k in range(3)))
            for i, name in enumerate(names)
        )
        aggregator.observe(Observation(at=START + 5.0 * version, statuses=told))
    return aggregator.health(now=START + 15)
