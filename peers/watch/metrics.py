"""Numbers for Prometheus: where they are served, those of one role, counted from its events, and those of a
run, from the dashboard's picture of it.

Names follow Prometheus' conventions: base units (seconds, bytes), the unit at the end, `_total` for what only
grows.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import UnionType
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    PlatformCollector,
    ProcessCollector,
    make_wsgi_app,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from peers import events
from peers.events import Emit, Event, kind, version_of
from peers.storage.atomic_file import as_setup_error
from swarm.monitoring.health import LEVELS, PeerHealth, SwarmHealth

MAX_AT_ONCE = 16
"""Connections, each a thread: the oldest makes way. What reaches the port may open many, silently."""


@contextlib.contextmanager
def served(listen: tuple[str, int], registry: CollectorRegistry) -> Iterator[str]:
    """Serve `/metrics` from a thread while the block runs. Yields its address.

    What is for this machine only answers to no name but localhost: any web page can have its own name lead
    here, and its scripts would read what is served under that name (DNS rebinding).

    Raises:
        SetupError: the address is taken, or not of this machine.
    """
    host, port = listen
    with as_setup_error(f"cannot serve metrics at {host}:{port}", ". Choose another port with --metrics"):
        server, thread = start_http_server(port, addr=host, registry=registry)
    if ipaddress.ip_address(host).is_loopback:
        told = make_wsgi_app(registry)

        def by_address(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            if is_address(environ.get("HTTP_HOST", "")):
                return told(environ, start_response)
            start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
            return [b"these numbers answer to no such name: ask by an address, or serve them on another one"]

        server.set_app(by_address)
    newest, begin = deque[socket.socket](), server.process_request

    def begin_one(request: Any, client_address: Any) -> None:
        newest.append(request)
        if len(newest) > MAX_AT_ONCE:
            with contextlib.suppress(OSError):  # it has ended
                newest.popleft().shutdown(socket.SHUT_RDWR)
        begin(request, client_address)

    server.process_request = begin_one
    server.handle_error = lambda request, client_address: None  # it broke: no page in the log
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def is_address(host: str) -> bool:
    """Whether a header `Host` is an IP address or localhost, with a port or without."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name.split(".")[-1] == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


Told: TypeAlias = tuple[str, str, "type[Event] | UnionType", str]
COUNTERS: tuple[Told, ...] = (
    ("steps", "Steps that were seen done (trainer) or applied (peer).", events.StepDone | events.Stepped, ""),
    ("microbatches", "Microbatches in this peer's sums of applied steps.", events.Stepped, "microbatches"),
    ("replayed_microbatches", "Microbatches run again (trainer).", events.Replayed, "count"),
    ("undone_microbatches", "Duplicates taken out of this peer's sum.", events.Undone, "count"),
    ("void_rounds", "All-reduces that were not whole and started again.", events.RoundAborted, ""),
    ("lost_peers", "Times that another peer did not answer any more.", events.PeerLost, ""),
    ("fetched_bytes", "State of stages that was downloaded.", events.StateFetched, "bytes"),
    ("checkpoints", "Stages written to disk.", events.Checkpointed, ""),
)
"""Name, words, the events that are counted, and the field that is added up; none: each event is one."""
GAUGES: tuple[Told, ...] = (
    ("stage", "Stage that is served; -1 = none.", events.Serving, "stage"),
    ("loss", "Mean loss of the last step (trainer).", events.StepDone, "loss"),
    ("tokens_per_second", "Throughput of the run (trainer).", events.StepDone, "tokens_per_s"),
)
"""Likewise, with the field that it is set to."""


class RoleMetrics:
    """Counts what one process does; called with each event, which it passes on. Any thread may call it."""

    def __init__(self, role: str, emit: Emit) -> None:
        self._emit = emit
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

        def made(kind: Callable[..., Any], name: str, words: str, *labels: str) -> Any:
            return kind(f"swarm_role_{name}", words, labels, registry=self.registry)

        self._info = Info("swarm_role", "This process.", registry=self.registry)
        self._about = {"role": role}
        self._info.info(self._about)
        self._events = made(Counter, "events", "Events of this process, by kind and level.", "event", "level")
        self._version = made(Gauge, "version", "Steps of the run that are in the weights, as seen here.")
        self._counters = [(made(Counter, name, words), of, field) for name, words, of, field in COUNTERS]
        self._gauges = [(made(Gauge, name, words), of, field) for name, words, of, field in GAUGES]
        self._gauges[0][0].set(-1)

    def __call__(self, event: Event) -> None:
        self._events.labels(kind(type(event)), event.level).inc()
        if isinstance(event, events.Started):
            self._about |= {"peer": event.peer, "run": event.run}
            self._info.info(self._about)
        for counter, kinds, field in self._counters:
            if isinstance(event, kinds):
                counter.inc(getattr(event, field) if field else 1)
        for gauge, kinds, field in self._gauges:
            if isinstance(event, kinds) and (value := getattr(event, field)) is not None:
                gauge.set(value)
        if (version := version_of(event)) is not None:
            self._version.set(version)
        self._emit(event)


def registry_of(health: Callable[[], SwarmHealth]) -> CollectorRegistry:
    """Numbers of the newest picture when they are asked for: all of one, so that they fit together."""

    class HealthCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            picture = health()
            yield from _of_run(picture)
            yield from _of_stages(picture)
            yield from _of_peers(list(picture.peers))

    registry = CollectorRegistry()
    registry.register(HealthCollector())
    return registry


def _of_run(health: SwarmHealth) -> Iterator[Metric]:
    yield InfoMetricFamily("swarm_run", "The run looked at.", value={"run": health.run, "name": health.name})
    numbers: dict[str, tuple[float | None, str]] = {
        "version": (health.version, "Steps that the run has taken."),
        "steps": (health.steps, "Steps of the whole run."),
        "loss": (health.loss, "Loss of the last finished step."),
        "eval_loss": (health.evaluations[-1][1] if health.evaluations else None, "Loss on held-out samples."),
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


def _of_stages(health: SwarmHealth) -> Iterator[Metric]:
    peers = GaugeMetricFamily("swarm_stage_peers", "Peers of a stage, by state.", labels=["stage", "state"])
    for stage in health.stages:
        silent = sum(bool(peer.why) for peer in stage.peers)
        for state, count in (("serving", stage.serving), ("joining", stage.joining), ("silent", silent)):
            peers.add_metric([str(stage.stage), state], count)
    yield peers
    for name, words in (
        ("version", "Newest version that most peers of a stage have."),
        ("load_microbatches", "Microbatches that wait or are worked on, the mean of its peers."),
        ("speed_microbatches_per_second", "Microbatches per second that all devices of a stage can do."),
    ):
        family = GaugeMetricFamily(f"swarm_stage_{name}", words, labels=["stage"])
        for stage in health.stages:
            family.add_metric([str(stage.stage)], getattr(stage, name.partition("_")[0]))
        yield family


PEER_GAUGES: dict[str, tuple[Callable[[PeerHealth], float | None], str]] = {
    "version": (lambda peer: peer.version, "Version of its weights."),
    "speed_microbatches_per_second": (lambda peer: peer.speed or None, "What its device can do."),
    "load_microbatches": (lambda peer: peer.load, "That wait for its device or are on it, on average."),
    "inflight_microbatches": (lambda peer: peer.inflight, "That it has taken and not answered yet."),
    "busy_ratio": (lambda peer: peer.busy, "Share of the time in which its device worked."),
    "start_timestamp_seconds": (lambda peer: peer.since or None, "Unix time at which it joined, as it says."),
    "doubts": (lambda peer: len(peer.inconsistencies), "Things that it says and cannot be true."),
}
PEER_COUNTERS: dict[str, tuple[Callable[[PeerHealth], float | None], str]] = {
    "computed_microbatches": (lambda peer: peer.computed if peer.answered else None, "That it computed."),
    "received_bytes": (lambda peer: peer.bytes_in if peer.answered else None, "From other peers."),
    "sent_bytes": (lambda peer: peer.bytes_out if peer.answered else None, "To other peers."),
    "memory_bytes": (lambda peer: peer.memory_bytes if peer.answered else None, "Of both: in memory."),
}
"""Of a peer that does not answer none is known: it would be 0, and a counter never falls."""


def _of_peers(peers: list[PeerHealth]) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "swarm_peer_up", "1 if it answered when it was last asked.", labels=["peer", "stage", "device"]
    )
    for peer in peers:
        up.add_metric([peer.peer, str(peer.stage), peer.device], float(peer.answered))
    yield up
    for family_of, numbers in ((GaugeMetricFamily, PEER_GAUGES), (CounterMetricFamily, PEER_COUNTERS)):
        for name, (number, words) in numbers.items():
            family = family_of(f"swarm_peer_{name}", words, labels=["peer", "stage"])
            for peer in peers:
                if (value := number(peer)) is not None:
                    family.add_metric([peer.peer, str(peer.stage)], value)
            yield family
