"""Numbers for Prometheus: where they are served, and those of one role, counted from its events.

Names follow Prometheus' conventions: base units (seconds, bytes), the unit at the end, `_total` for what only
grows. What the dashboard tells of a whole run is `peers.watch.prometheus`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, TypeAlias

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)

from peers import events
from peers.events import Emit, Event, kind, version_of
from peers.storage.atomic_file import told


@contextlib.contextmanager
def served(listen: tuple[str, int], registry: CollectorRegistry) -> Iterator[str]:
    """Serve `/metrics` from a thread while the block runs. Yields its address.

    Raises:
        SetupError: the address is taken, or not of this machine.
    """
    host, port = listen
    with told(f"cannot serve metrics at {host}:{port}", ". Choose another port with --metrics"):
        server, thread = start_http_server(port, addr=host, registry=registry)
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Told: TypeAlias = tuple[str, str, "type[Event] | UnionType", str]
COUNTERS: tuple[Told, ...] = (
    ("steps", "Steps that were seen done (trainer) or applied (peer).", events.StepDone | events.Stepped, ""),
    (
        "microbatches",
        "Microbatches in this peer's own sums of applied steps.",
        events.Stepped,
        "microbatches",
    ),
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
