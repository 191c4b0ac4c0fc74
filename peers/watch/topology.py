"""The picture of a swarm as SVG: a column per stage, a dot per peer, a line per route. Pure.

Everything that others wrote is escaped. Colours are CSS classes, so that the page's dark and light apply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from peers.events import count
from swarm.errors import short
from swarm.ids import PeerId
from swarm.monitoring.alerts import SLOW
from swarm.monitoring.health import PeerHealth, SwarmHealth

HEIGHT = 340.0
TOP = 44.0
"""For the names of the columns."""
COLUMN = 120.0
MAX_LINES = 400
"""Routes that are drawn, the busiest: more would be a grey surface."""
LABELLED = 6
"""Peers of a column, up to which each has its name beside it."""
WIDEST = 7.0
FEW = 24
"""Lines, up to which the busiest is that wide: many are thinner."""


def svg(health: SwarmHealth) -> str:
    """The whole picture. Its size in pixels is that of its view box, or less where the page is narrow."""
    columns: list[tuple[str, str, Sequence[PeerHealth | PeerId]]] = []
    if health.trainers:
        columns.append(("trainers", str(len(health.trainers)), health.trainers))
    columns += [(f"stage {one.label}", count(one.serving, "peer"), one.peers) for one in health.stages]
    if health.keepers:
        columns.append(("keepers", str(len(health.keepers)), health.keepers))
    width = COLUMN * len(columns)
    at: dict[PeerId, tuple[float, float]] = {}
    names, dots = list[str](), list[str]()
    for i, (name, words, members) in enumerate(columns):
        x = COLUMN * (i + 0.5)
        names.append(f'<text class="name" x="{x:g}" y="16">{escape(name)}</text>')
        names.append(f'<text x="{x:g}" y="31">{escape(words)}</text>')
        radius, places = _places(len(members), x)
        for member, (px, py) in zip(members, places, strict=True):
            peer = member if isinstance(member, str) else member.peer
            at[peer] = px, py
            dots.append(_dot(member, px, py, radius, len(members) <= LABELLED))
    lines = _lines(health, at)
    smallest = min(width, 320.0 + 24.0 * len(columns))
    return (
        f'<svg viewBox="0 0 {width:g} {HEIGHT:g}" style="min-width: {smallest:g}px; max-height: 480px" '
        f'role="img" aria-label="peers by stage">{"".join(lines)}{"".join(names)}{"".join(dots)}</svg>'
    )


def _places(n: int, x: float) -> tuple[float, list[tuple[float, float]]]:
    """Radius, and centres: one below the other, in as many rows side by side as are needed."""
    if not n:
        return 0.0, []
    high, wide = HEIGHT - TOP, COLUMN * 0.72
    across = max(1, math.ceil(math.sqrt(n * wide / high)) if n > LABELLED else 1)
    down = math.ceil(n / across)
    radius = min(11.0, 0.42 * wide / across, 0.34 * high / down)
    places = []
    for i in range(n):
        column, row = divmod(i, down)
        px = x + (column - (across - 1) / 2) * wide / across
        places.append((px, TOP + (row + 0.5) * high / down))
    return radius, places


def _dot(member: PeerHealth | PeerId, x: float, y: float, radius: float, labelled: bool) -> str:
    if isinstance(member, str):
        peer, kind, title = member, "trainer", f"trainer {member}"
    else:
        peer, kind = member.peer, _kind(member)
        about = [f"{member.peer}", f"{member.state}, version {member.version}, {member.device}"]
        about += [f"does not answer: {member.why}"] if member.why else []
        title = "\n".join([*about, *member.inconsistencies])
    label = f'<text x="{x:.1f}" y="{y + radius + 11:.1f}">{escape(short(peer))}</text>' if labelled else ""
    name = escape(peer)
    return (
        f'<a class="{kind}" href="/peer/{quote(peer)}" data-peer="{name}"><title>{escape(title)}</title>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>{label}</a>'
    )


def _kind(peer: PeerHealth) -> str:
    """The CSS class: one of ours, never a stranger's word."""
    if peer.why:
        return "silent"
    if peer.inconsistencies or peer.slower >= SLOW:
        return "odd"
    return peer.state if peer.state in ("joining", "leaving", "keeping", "paused") else "serving"


def _lines(health: SwarmHealth, at: dict[PeerId, tuple[float, float]]) -> list[str]:
    drawn = [r for r in health.routes if r.source in at and r.target in at and r.source != r.target]
    busiest = max((route.bps for route in drawn), default=1.0)
    widest = WIDEST * min(1.0, math.sqrt(FEW / max(1, min(len(drawn), MAX_LINES))))
    lines = []
    for route in drawn[:MAX_LINES]:
        (x1, y1), (x2, y2) = at[route.source], at[route.target]
        thick = max(0.6, widest * math.sqrt(route.bps / busiest))
        words = f"{short(route.source)} – {short(route.target)}: {route.bps / 1e6:.2f} Mbit/s"
        lines.append(
            f'<line class="{route.kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke-width="{thick:.1f}"><title>{escape(words)}</title></line>'
        )
    return lines
