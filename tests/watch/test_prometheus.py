"""Numbers for Prometheus: by its conventions, really served, and the Grafana dashboard knows their names."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from peers import events
from peers.watch.metrics import MAX_AT_ONCE, RoleMetrics, registry_of, served
from swarm.errors import SetupError
from swarm.monitoring.aggregator import Aggregator
from tests.watch.pictures import RUN, START, crowd, troubled

GRAFANA = json.loads((Path(__file__).parents[2] / "scripts" / "grafana.json").read_text())


def run_registry() -> CollectorRegistry:
    aggregator, at = troubled()
    return registry_of(lambda: aggregator.health(now=at))


def all_events() -> list[events.Event]:
    return [
        events.Started(role="peer", peer="p", addresses=(), run=RUN.id),
        events.Serving(peer="p", stage=2, version=3, device="cpu"),
        events.Stepped(stage=2, t=3, microbatches=5),
        events.StepDone(t=4, steps=40, loss=2.5, tokens_per_s=1234.0),
        events.Replayed(t=4, count=2),
        events.Undone(stage=2, t=4, count=3),
        events.RoundAborted(stage=2, t=4, why="x"),
        events.PeerLost(peer="q", stage=1, why="x"),
        events.StateFetched(stage=2, version=3, source="q", bytes=1000, seconds=1.0),
        events.Checkpointed(stage=2, step=4, path="x"),
        events.Kept(version=4, stages=(0, 1)),
        events.RolledBack(stage=2, step=2),
        events.Note(text="x"),
    ]


def role_registry() -> CollectorRegistry:
    metrics = RoleMetrics("peer", lambda event: None)
    for event in all_events():
        metrics(event)
    return metrics.registry


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_picture_is_told_in_numbers() -> None:
    found = samples(run_registry())
    assert found["swarm_run_info", (("name", "demo"), ("run", RUN.id))] == 1
    assert found["swarm_run_version", ()] == 12
    assert found["swarm_run_tokens_per_second", ()] == pytest.approx(RUN.tokens_per_step / 2)
    assert found["swarm_stage_peers", (("stage", "2"), ("state", "silent"))] == 1
    assert found["swarm_alerts", (("level", "warning"),)] == 4
    silent = (("device", "cpu"), ("peer", "peer-f"), ("stage", "2"))
    assert found["swarm_peer_up", silent] == 0
    assert found["swarm_peer_computed_microbatches_total", (("peer", "peer-a"), ("stage", "0"))] == 240
    # One that does not answer has not computed less: its counters pause.
    assert ("swarm_peer_computed_microbatches_total", (("peer", "peer-f"), ("stage", "2"))) not in found


def test_a_run_of_which_nothing_is_known_has_no_invented_numbers() -> None:
    found = samples(registry_of(lambda: Aggregator(RUN).health(now=START)))
    assert not {"swarm_run_loss", "swarm_run_tokens_per_second"} & {name for name, _ in found}


def test_what_strangers_write_stays_inside_its_label() -> None:
    aggregator, at = troubled()
    evil = 'x"} 1\nswarm_run_version 99'
    health = msgspec.structs.replace(aggregator.health(now=at), refused={evil: 3})
    found = samples(registry_of(lambda: health))
    assert found["swarm_refused_records_total", (("reason", evil),)] == 3
    assert found["swarm_run_version", ()] == 12


def test_a_roles_events_are_counted_and_passed_on() -> None:
    heard: list[events.Event] = []
    metrics = RoleMetrics("peer", heard.append)
    for event in all_events():
        metrics(event)
    assert heard == all_events()
    found = samples(metrics.registry)
    told = {
        name: value for (name, labels), value in found.items() if name.startswith("swarm_role") and not labels
    }
    assert {name: value for name, value in told.items() if not name.endswith("_created")} == {
        "swarm_role_steps_total": 2, "swarm_role_version": 2, "swarm_role_stage": 2, "swarm_role_loss": 2.5,
        "swarm_role_tokens_per_second": 1234, "swarm_role_microbatches_total": 5,
        "swarm_role_replayed_microbatches_total": 2, "swarm_role_undone_microbatches_total": 3,
        "swarm_role_void_rounds_total": 1, "swarm_role_lost_peers_total": 1,
        "swarm_role_fetched_bytes_total": 1000, "swarm_role_checkpoints_total": 1,
    }  # fmt: skip
    assert found["swarm_role_info", (("peer", "p"), ("role", "peer"), ("run", RUN.id))] == 1
    assert found["swarm_role_events_total", (("event", "peer_lost"), ("level", "warning"))] == 1
    assert found["process_resident_memory_bytes", ()] > 1e6


@pytest.mark.parametrize("registry", [run_registry(), role_registry()])
def test_names_and_units_follow_the_conventions(registry: CollectorRegistry) -> None:
    for family in registry.collect():
        if not family.name.startswith("swarm_"):
            continue
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|s|kb|mb|bps|percent|count)$", family.name)
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter") or sample.name.endswith(
                "_created"
            )


def test_they_are_served_on_this_machine_only_and_no_longer_than_wanted() -> None:
    with served(("127.0.0.1", 0), run_registry()) as place:
        port = int(place.removeprefix("http://127.0.0.1:").removesuffix("/metrics"))
        with urllib.request.urlopen(place, timeout=10) as answer:
            assert "swarm_run_version 12.0" in answer.read().decode()
        with pytest.raises(
            SetupError, match=f"cannot serve metrics at 127.0.0.1:{port}: Address already in use"
        ):
            with served(("127.0.0.1", port), run_registry()):
                pass
    with pytest.raises(OSError):
        urllib.request.urlopen(place, timeout=10)


def test_who_opens_connections_and_says_nothing_takes_few_threads_and_has_nothing_logged(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A process may have 1,024 files: with all of them taken a peer connects to nobody."""
    before, reset = threading.active_count(), struct.pack("ii", 1, 0)
    with served(("127.0.0.1", 0), run_registry()) as place, contextlib.ExitStack() as on_end:
        port = int(place.removeprefix("http://127.0.0.1:").removesuffix("/metrics"))
        for _ in range(2 * MAX_AT_ONCE):
            one = on_end.enter_context(socket.create_connection(("127.0.0.1", port)))
        with urllib.request.urlopen(place, timeout=10) as answer:
            assert "swarm_run_version 12.0" in answer.read().decode()
        until = time.monotonic() + 10
        while threading.active_count() > before + 1 + MAX_AT_ONCE:
            assert time.monotonic() < until, threading.active_count()
            urllib.request.urlopen(place, timeout=10).close()
        one.sendall(b"GET /metr")
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        one.close()
        urllib.request.urlopen(place, timeout=10).close()
    assert capfd.readouterr().err == ""


def test_500_peers_are_told_in_one_answer() -> None:
    health = crowd(500)
    found = samples(registry_of(lambda: health))
    assert sum(name == "swarm_peer_up" for name, _ in found) == 500


# --- Grafana ------------------------------------------------------------------------------------------------


def panels() -> list[dict[str, Any]]:
    return GRAFANA["panels"]


def test_grafana_asks_for_numbers_that_exist() -> None:
    exported = {name for registry in (run_registry(), role_registry()) for name, _ in samples(registry)}
    labels = {label for registry in (run_registry(),) for _, pairs in samples(registry) for label, _ in pairs}
    for panel in panels():
        for target in panel["targets"]:
            asked = set(re.findall(r"\bswarm_[a-z0-9_]+", target["expr"]))
            assert asked and asked <= exported, (panel["title"], asked - exported)
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels
            named = re.findall(r"by \((\w+)\)", target["expr"]) + re.findall(r"[{,](\w+)=", target["expr"])
            assert set(named) <= labels, (panel["title"], named)
            # What counts up is shown as a rate, nothing else is; the window has to hold two samples, however
            # seldom Prometheus asks, which its own default of a minute does not do in a window of a minute.
            counters = [name for name in asked if name.endswith("_total")]
            rates = re.findall(r"rate\((\w+)\[\$__rate_interval\]\)", target["expr"])
            assert rates == counters and target["expr"].count("rate(") == len(rates), panel["title"]


def test_grafanas_panels_have_what_it_needs_and_do_not_overlap() -> None:
    assert GRAFANA["schemaVersion"] >= 36 and GRAFANA["title"] and GRAFANA["uid"]
    sources = [v["name"] for v in GRAFANA["templating"]["list"] if v["type"] == "datasource"]
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        assert panel["type"] in ("stat", "timeseries", "table") and panel["title"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${" + sources[0] + "}"}
        assert panel["fieldConfig"]["defaults"]["unit"] in ("short", "s", "Bps", "percentunit")
        assert panel["type"] != "table" or all(
            t["format"] == "table" and t["instant"] for t in panel["targets"]
        )
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
