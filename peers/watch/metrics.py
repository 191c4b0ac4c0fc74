"""Numbers for Prometheus: where they are served, and those of one role, counted from its events.

Names follow Prometheus' conventions: base units (seconds, bytes), the unit at the end, `_total` for what only
grows. What the dashboard tells of a whole run is `peers.watch.prometheus`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
from peers.events import Emit, Event, kind
from swarm.errors import SetupError


@contextlib.contextmanager
def served(listen: tuple[str, int], registry: CollectorRegistry) -> Iterator[str]:
    """Serve `/metrics` from a thread while the block runs. Yields its address.

    Raises:
        SetupError: the address is taken, or not of this machine.
    """
    host, port = listen
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise SetupError(
            f"cannot serve metrics at {host}:{port}: {error.strerror}. Choose another port with --metrics"
        ) from None
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class RoleMetrics:
    """Counts what one process does; called with each event, which it passes on. Any thread may call it."""

    def __init__(self, role: str, emit: Emit) -> None:
        self._emit = emit
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"swarm_role_{name}", words, labels, registry=self.registry)

        def gauge(name: str, words: str) -> Gauge:
            return Gauge(f"swarm_role_{name}", words, registry=self.registry)

        self._info = Info("swarm_role", "This process.", registry=self.registry)
        self._about = {"role": role}
        self._info.info(self._about)
        self._events = counter("events", "Events of this process, by kind and level.", "event", "level")
        self._steps = counter("steps", "Steps that were seen done (trainer) or applied (peer).")
        self._version = gauge("version", "Steps of the run that are in the weights, as seen here.")
        self._stage = gauge("stage", "Stage that is served; -1 = none.")
        self._stage.set(-1)
        self._loss = gauge("loss", "Mean loss of the last step (trainer).")
        self._pace = gauge("tokens_per_second", "Throughput of the run (trainer).")
        self._own = counter("microbatches", "Microbatches in this peer's own sums of applied steps.")
        self._replayed = counter("replayed_microbatches", "Microbatches run again (trainer).")
        self._undone = counter("undone_microbatches", "Duplicates taken out of this peer's sum.")
        self._void = counter("void_rounds", "All-reduces that were not whole and started again.")
        self._lost = counter("lost_peers", "Times that another peer did not answer any more.")
        self._fetched = counter("fetched_bytes", "State of stages that was downloaded.")
        self._checkpoints = counter("checkpoints", "Stages written to disk.")

    def __call__(self, event: Event) -> None:
        self._events.labels(kind(type(event)), event.level).inc()
        if isinstance(event, events.Started):
            self._about |= {"peer": event.peer, "run": event.run}
            self._info.info(self._about)
        elif isinstance(event, events.Serving):
            self._stage.set(event.stage)
            self._version.set(event.version)
        elif isinstance(event, events.StepDone):
            self._steps.inc()
            self._version.set(event.t + 1)
            self._pace.set(event.tokens_per_s)
            if event.loss is not None:
                self._loss.set(event.loss)
        elif isinstance(event, events.Stepped):
            self._steps.inc()
            self._version.set(event.t + 1)
            self._own.inc(event.microbatches)
        elif isinstance(event, events.Replayed):
            self._replayed.inc(event.count)
        elif isinstance(event, events.Undone):
            self._undone.inc(event.count)
        elif isinstance(event, events.RoundAborted):
            self._void.inc()
        elif isinstance(event, events.PeerLost):
            self._lost.inc()
        elif isinstance(event, events.StateFetched):
            self._fetched.inc(event.bytes)
        elif isinstance(event, events.Checkpointed):
            self._checkpoints.inc()
        elif isinstance(event, events.Kept | events.RolledBack):
            self._version.set(event.version if isinstance(event, events.Kept) else event.step)
        self._emit(event)
