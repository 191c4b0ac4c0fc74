"""The dashboard for Prometheus: a picture of a run in, its numbers out. Names as in `peers.watch.metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from swarm.monitoring.health import LEVELS, PeerHealth, SwarmHealth


def registry_of(health: Callable[[], SwarmHealth]) -> CollectorRegistry:
    """Numbers of the newest picture when they are asked for: all of one, so that they fit together."""

    class HealthCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            picture = health()
            yield from _run(picture)
            yield from _stages(picture)
            yield from _peers(list(picture.peers))

    registry = CollectorRegistry()
    registry.register(HealthCollector())
    return registry


def _run(health: SwarmHealth) -> Iterator[Metric]:
    info = {"run": health.run, "name": health.name}
    yield InfoMetricFamily("swarm_run", "The run that is looked at.", value=info)
    numbers: dict[str, tuple[float | None, str]] = {
        "version": (health.version, "Steps that the run has taken."),
        "steps": (health.steps, "Steps of the whole run."),
        "loss": (health.loss, "Loss of the last finished step."),
        "eval_loss": (
            health.evaluations[-1][1] if health.evaluations else None,
            "Loss on held-out samples, as last evaluated.",
        ),
        "tokens_per_second": (health.tokens_per_s, "Throughput of the last minute."),
        "step_seconds": (health.step_s, "What a step took lately."),
        "last_step_age_seconds": (health.still_s, "Since the last step was seen."),
        "trainers": (len(health.trainers), "Trainers that were seen lately."),
        "looked_at_timestamp_seconds": (health.at, "Unix time of the last look."),
    }
    for name, (value, words) in numbers.items():
        if value is not None:
            yield GaugeMetricFamily(f"swarm_run_{name}", words, value=value)
    yield CounterMetricFamily(
        "swarm_run_rollbacks", "Times that the run went back to a checkpoint.", value=health.went_back
    )
    alerts = GaugeMetricFamily("swarm_alerts", "What a person should look at.", labels=["level"])
    for level in LEVELS:
        alerts.add_metric([level], sum(alert.level == level for alert in health.alerts))
    yield alerts
    refused = CounterMetricFamily(
        "swarm_refused_records", "Records of strangers that were refused.", labels=["reason"]
    )
    for reason, count in health.refused.items():
        refused.add_metric([reason], count)
    yield refused


def _stages(health: SwarmHealth) -> Iterator[Metric]:
    peers = GaugeMetricFamily("swarm_stage_peers", "Peers of a stage, by state.", labels=["stage", "state"])
    for stage in health.stages:
        silent = sum(bool(peer.why) for peer in stage.peers)
        for state, count in (("serving", stage.serving), ("joining", stage.joining), ("silent", silent)):
            peers.add_metric([str(stage.stage), state], count)
    yield peers
    for name, words in (
        ("version", "Newest version that most peers of a stage have."),
        ("load", "Microbatches that wait or are worked on, the mean of its peers."),
        ("speed", "Microbatches per second that all devices of a stage can do."),
    ):
        unit = "_microbatches_per_second" if name == "speed" else "_microbatches" if name == "load" else ""
        family = GaugeMetricFamily(f"swarm_stage_{name}{unit}", words, labels=["stage"])
        for stage in health.stages:
            family.add_metric([str(stage.stage)], getattr(stage, name))
        yield family


GAUGES: dict[str, tuple[Callable[[PeerHealth], float | None], str]] = {
    "version": (lambda peer: peer.version, "Version of its weights."),
    "speed_microbatches_per_second": (lambda peer: peer.speed or None, "What its device can do."),
    "load_microbatches": (lambda peer: peer.load, "That wait for its device or are on it, on average."),
    "inflight_microbatches": (lambda peer: peer.inflight, "That it has taken and not answered yet."),
    "busy_ratio": (lambda peer: peer.busy, "Share of the time in which its device worked."),
    "start_timestamp_seconds": (lambda peer: peer.since or None, "Unix time at which it joined, as it says."),
    "doubts": (lambda peer: len(peer.inconsistencies), "Things that it says and cannot be true."),
}
COUNTERS: dict[str, tuple[Callable[[PeerHealth], float | None], str]] = {
    "computed_microbatches": (lambda peer: peer.computed if peer.answered else None, "That it computed."),
    "received_bytes": (lambda peer: peer.bytes_in if peer.answered else None, "From other peers."),
    "sent_bytes": (lambda peer: peer.bytes_out if peer.answered else None, "To other peers."),
    "memory_bytes": (lambda peer: peer.memory_bytes if peer.answered else None, "Of both: in memory."),
}
"""Of a peer that does not answer none is known: it would be 0, and a counter never falls."""


def _peers(peers: list[PeerHealth]) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "swarm_peer_up", "1 if it answered when it was last asked.", labels=["peer", "stage", "device"]
    )
    for peer in peers:
        up.add_metric([peer.peer, str(peer.stage), peer.device], float(peer.answered))
    yield up
    for family_of, numbers in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, (number, words) in numbers.items():
            family = family_of(f"swarm_peer_{name}", words, labels=["peer", "stage"])
            for peer in peers:
                if (value := number(peer)) is not None:
                    family.add_metric([peer.peer, str(peer.stage)], value)
            yield family
