"""The drawing: everybody is in it, nothing lies outside, and what strangers write stays text."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import msgspec
import pytest

from peers.watch import topology
from swarm.monitoring.aggregator import Aggregator
from swarm.monitoring.health import Observation, SwarmHealth
from swarm.monitoring.validation import tidy
from tests.watch.pictures import RUN, START, crowd, record, troubled

SVG = "{http://www.w3.org/2000/svg}"


def drawn(health: SwarmHealth) -> ElementTree.Element:
    text = topology.svg(health).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return ElementTree.fromstring(text)


def test_peers_stand_in_the_column_of_their_stage_and_look_as_they_are() -> None:
    aggregator, at = troubled()
    picture = drawn(aggregator.health(now=at))
    dots = {dot.get("data-peer"): dot for dot in picture.iter(f"{SVG}a")}
    x = {name: float(dot.find(f"{SVG}circle").get("cx")) for name, dot in dots.items()}
    assert x["trainer"] < x["peer-a"] == x["peer-b"] < x["peer-c"] == x["peer-d"] < x["peer-e"] < x["keeper"]
    kinds = {name: dot.get("class") for name, dot in dots.items()}
    assert kinds == {
        "trainer": "trainer", "peer-a": "serving", "peer-b": "serving", "peer-c": "odd", "peer-d": "serving",
        "peer-e": "odd", "peer-f": "silent", "keeper": "keeping",
    }  # fmt: skip
    assert dots["peer-f"].get("href") == "/peer/peer-f"
    assert "does not answer: the connection broke" in (dots["peer-f"].find(f"{SVG}title").text or "")


def test_a_route_is_as_thick_as_its_traffic() -> None:
    aggregator, at = troubled()
    picture = drawn(aggregator.health(now=at))
    lines = {line.find(f"{SVG}title").text.split(":")[0]: line for line in picture.iter(f"{SVG}line")}
    assert {"rainer – peer-a", "peer-a – peer-c", "peer-c – peer-e"} <= set(lines)
    assert lines["rainer – peer-a"].get("class") == "feed"
    assert all(0.5 < float(line.get("stroke-width")) <= topology.WIDEST for line in lines.values())


@pytest.mark.parametrize(("peers", "stages"), [(500, 8), (500, 1), (64, 64), (3, 2)])
def test_everybody_is_inside_the_picture_and_nobody_on_top_of_another(peers: int, stages: int) -> None:
    picture = drawn(crowd(peers, stages))
    width, height = map(float, picture.get("viewBox").split()[2:])
    circles = [circle for circle in picture.iter(f"{SVG}circle") if circle is not None]
    assert len(circles) == peers + 1  # and a trainer
    at = set()
    for circle in circles:
        x, y, r = (float(circle.get(name)) for name in ("cx", "cy", "r"))
        assert r <= x <= width - r and r <= y <= height - r and r > 1
        at.add((x, y))
    assert len(at) == len(circles)
    assert len(list(picture.iter(f"{SVG}line"))) <= topology.MAX_LINES


def test_an_empty_run_is_drawn_too() -> None:
    picture = drawn(Aggregator(RUN).health(now=START))
    assert [text.text for text in picture.iter(f"{SVG}text")][::2] == ["stage 0", "stage 1", "stage 2"]


def test_what_strangers_write_stays_text() -> None:
    evil = '"><script>alert(1)</script>'
    aggregator = Aggregator(RUN)
    wild = msgspec.structs.replace(record(f"peer{evil}", 0), device=evil)
    aggregator.observe(Observation(at=START, records=(tidy(wild),), silent={wild.peer: evil}))
    text = topology.svg(aggregator.health(now=START))
    assert "<script" not in text
    (dot,) = drawn(aggregator.health(now=START)).iter(f"{SVG}a")
    assert dot.get("data-peer") == wild.peer and evil in (dot.find(f"{SVG}title").text or "")
