"""The dashboard in a terminal: a picture in, a screen of a given size out.

`render` is pure, so that the screen has golden tests; it never draws more lines than there are. `LiveScreen`
owns the terminal: a live screen on one,
plain lines anywhere else. Whatever strangers wrote was cleaned before.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from functools import partial
from typing import TextIO, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from peers.events import count, time_of_day
from swarm.errors import short
from swarm.monitoring.alerts import SLOW
from swarm.monitoring.health import Alert, PeerHealth, StageHealth, SwarmHealth
from swarm.records import NO_STAGE

STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}
MAX_HAPPENINGS = 4
MIN_PEERS = 3
"""Rows that other parts leave for peers."""
GAP = 2
"""Between columns."""
BARS = "▁▂▃▄▅▆▇█"
LINES_EVERY_S = 10.0
"""Off a terminal a line about the steps comes this often."""


def render(health: SwarmHealth, *, width: int = 80, height: int = 24) -> RenderableType:
    """The screen, of at most `height` lines; more than there can be shows all."""
    top = [_title(health, width), _steps(health, width), _loss(health, width)]
    top += _alerts(health.alerts, max(2, height // 6))
    there = sum(1 for _ in health.peers)
    room = height - len(top) - 2  # an empty line before each table
    least = min(MIN_PEERS, there) + 1
    stages = _fitting(len(health.stages), min(room // 3, room - 2 - least))
    both = stages > 0
    if not both:  # the stages' table tells more
        stages = _fitting(len(health.stages), room)
    if stages <= 0:
        return Group(*top[:height])
    middle = [_stages(health, stages, width), *_more(len(health.stages) - stages, "stage")]
    room -= stages + len(middle) - (not both)
    said = min(len(health.happenings), MAX_HAPPENINGS, max(0, room - (least if both else 0)))
    peers = _fitting(there, room - said - 1) if both else 0
    low: list[RenderableType] = []
    if peers > 0:
        low = [Text(), _peers(health, peers, width), *_more(there - peers, "peer")]
    events = health.happenings[len(health.happenings) - said :]
    return Group(*top, Text(), *middle, *low, *(_happening(line.at, line.text, width) for line in events))


def _fitting(wanted: int, room: int) -> int:
    """How many rows are drawn: all, or one less than there is room for, and a line that says so."""
    return wanted if wanted <= room else max(0, room - 1)


def _more(hidden: int, noun: str) -> list[Text]:
    return [Text(f"  … {count(hidden, f'more {noun}')}", style="dim")] if hidden > 0 else []


def _title(health: SwarmHealth, width: int) -> Text:
    title = Text(f"{health.name}  {health.run}", style="bold", no_wrap=True)
    title.truncate(max(8, width - 10), overflow="ellipsis", pad=True)
    return title.append(f"  {time_of_day(health.at)}", style="dim")


def _steps(health: SwarmHealth, width: int) -> RenderableType:
    words = f"{health.version}/{health.steps}"
    if health.tokens_per_s is not None:
        words += f"  {health.tokens_per_s:,.0f} tokens/s"
    if health.left_s:
        words += f"  {clock(health.left_s)} left"
    if len(words) + 14 > width:
        return Text(f" step  {words}", no_wrap=True, overflow="ellipsis")
    line = ProgressBar(health.steps or 1, health.version, width=max(4, width - 10 - len(words)))
    row = Table.grid(padding=(0, 2))
    row.add_row(Text(" step", style="dim"), line, words)
    return row


def _loss(health: SwarmHealth, width: int) -> Text:
    line = Text(" loss  ", style="dim", no_wrap=True)
    held_out = ""
    if health.evaluations:
        version, loss = health.evaluations[-1]
        held_out = f"   held out {loss:.4f} at step {version}"
    line.append(curve([loss for _, loss in health.losses], width - 8 - len(held_out)), style="not dim")
    return line.append(held_out, style="not dim")


def _alerts(alerts: Sequence[Alert], most: int) -> list[Text]:
    """The worst, a line each."""
    shown = alerts if len(alerts) <= most else alerts[: most - 1]
    lines = [
        Text(f" ! {alert.text}", style=STYLES[alert.level], no_wrap=True, overflow="ellipsis")
        for alert in shown
    ]
    if len(shown) < len(alerts):
        lines.append(Text(f" ! and {count(len(alerts) - len(shown), 'alert')} more", style="yellow"))
    return lines


Cells: TypeAlias = "dict[str, str | Text]"
"""By column, whose name starts with `<` if it is aligned to the left."""


def _table(rows: Sequence[tuple[str, Cells]], width: int, first_out: Sequence[str]) -> Table:
    """Rows are a style and their cells. Where not all columns fit, those of `first_out` go, one by one."""
    names = rows[0][1].keys()
    shown = {name: max(len(name.lstrip("<")), *(len(cells[name]) for _, cells in rows)) for name in names}
    for name in first_out:
        if sum(shown.values()) + GAP * (len(shown) - 1) <= width:
            break
        shown.pop(name, None)
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for name in shown:
        justify = "left" if name.startswith("<") else "right"
        table.add_column(name.lstrip("<"), justify=justify, no_wrap=True, overflow="ellipsis")
    for style, cells in rows:
        table.add_row(*(Text.assemble(cells[name]) for name in shown), style=style)  # no markup of strangers
    return table


def _stages(health: SwarmHealth, most: int, width: int) -> Table:
    # Where not all fit, those with the fewest peers are of interest.
    chosen = sorted(health.stages, key=lambda stage: (stage.serving, stage.stage))[:most]
    rows: list[tuple[str, Cells]] = []
    for stage in sorted(chosen, key=lambda stage: stage.stage):
        few = stage.serving < min(2, stage.most_serving)
        cells: Cells = {
            _heading(health): stage.label,
            "peers": str(stage.serving) + (f"+{stage.joining}" if stage.joining else ""),
            "load": f"{stage.load:.1f}",
            "version": str(stage.version),
            "work/s": f"{stage.speed:.2f}",
            "<slowest": _speed_of(stage, stage.slowest),
            "<fastest": _speed_of(stage, stage.fastest),
        }
        rows.append(("bold red" if not stage.serving else "yellow" if few else "", cells))
    return _table(rows, width, ("<fastest", "<slowest", "load", "work/s", "version"))


def _heading(health: SwarmHealth) -> str:
    return "stage" if health.islands == 1 else "island.stage"


def _speed_of(stage: StageHealth, name: str | None) -> str:
    return "".join(f"{short(peer.peer)} {peer.speed:.2f}" for peer in stage.peers if peer.peer == name)


def _peers(health: SwarmHealth, most: int, width: int) -> Table:
    # Where not all fit, those with something to look at come first.
    chosen = sorted(health.peers, key=lambda peer: not _odd(peer))[:most]
    voiced = any(peer.voice for peer in health.peers)
    rows: list[tuple[str, Cells]] = []
    for peer in sorted(chosen, key=lambda peer: (peer.stage == NO_STAGE, peer.stage, peer.peer)):
        asked, admits = peer.answered and peer.stage != NO_STAGE, peer.answered and peer.max_inflight
        device = Text(peer.device)
        device.truncate(9, overflow="ellipsis")
        cells: Cells = {
            _heading(health): peer.label,
            "<peer": short(peer.peer),
            **({"voice": str(peer.voice or "–")} if voiced else {}),
            "<device": device,
            "version": str(peer.version),
            "step": f"{peer.done}/{health.microbatches_per_step}" if asked else "–",
            "work/s": f"{peer.speed:.2f}" if peer.speed else "–",
            "in flight": f"{peer.inflight}/{peer.max_inflight}" if admits else "–",
            "queue": f"{peer.load:.1f}",
            "up": "–" if peer.up_s is None else clock(peer.up_s),
            "computed": f"{peer.computed:,}",
            "<last": _last(peer),
        }
        rows.append(("red" if peer.why else "yellow" if _odd(peer) else "", cells))
    first_out = ("step", "version", "queue", "in flight", "<device", "up", "computed", "voice", "work/s")
    return _table(rows, width, first_out)


def _odd(peer: PeerHealth) -> bool:
    return bool(peer.why or peer.inconsistencies or peer.slower >= SLOW)


def _last(peer: PeerHealth) -> str:
    if peer.why:
        return "no answer"
    if peer.inconsistencies:
        return "doubted"
    return peer.last if peer.state == "serving" and peer.last else peer.state


def _happening(at: float, text: str, width: int) -> Text:
    line = Text(f" {time_of_day(at)}  {text}", style="dim", no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


def curve(losses: Sequence[float], room: int) -> str:
    """The first and the last loss, and a line between them, in `room` columns."""
    if not losses:
        return "–"
    words = f"{losses[0]:.3f} → {losses[-1]:.3f}"
    return f"{words}  {sparkline(losses, room - len(words) - 2)}"


def clock(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars from the smallest to the largest, averaged into at most `width` columns."""
    if not values or width <= 0:
        return ""
    columns = min(width, len(values))
    cuts = [i * len(values) // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    if high <= low:
        return BARS[0] * columns
    return "".join(BARS[min(7, int((value - low) / (high - low) * 8))] for value in means)


class LiveScreen:
    """Shows pictures while a `with` block runs; call it with each."""

    def __init__(self, *, stream: TextIO | None = None) -> None:
        """`stream`: stdout by default."""
        stream = stream if stream is not None else sys.stdout
        self._print = partial(print, file=stream, flush=True)
        self._console = Console(file=stream, highlight=False)
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, screen=True, auto_refresh=False) if live else None
        self._said_at = self._happened_at = 0.0
        self._version = -1
        self._alerts: set[str] = set()

    @property
    def live(self) -> bool:
        return self._live is not None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, health: SwarmHealth) -> None:
        if self._live is not None:
            size = self._console.size
            self._live.update(render(health, width=size.width, height=size.height), refresh=True)
            return
        stamp = time_of_day(health.at)
        for line in health.happenings:
            if line.at > self._happened_at:
                self._print(f"{time_of_day(line.at)}  {line.text}")
        self._happened_at = max((line.at for line in health.happenings), default=self._happened_at)
        for alert in health.alerts:
            if (sort := _sort(alert)) not in self._alerts:
                self._print(f"{stamp}  ! {alert.text}")
                self._alerts.add(sort)
        self._alerts &= {_sort(alert) for alert in health.alerts}
        if health.version != self._version and health.at - self._said_at >= LINES_EVERY_S:
            loss = "" if health.loss is None else f", loss {health.loss:.4f}"
            pace = "" if health.tokens_per_s is None else f", {health.tokens_per_s:,.0f} tokens/s"
            peers = " ".join(str(stage.serving) for stage in health.stages)
            self._print(f"{stamp}  step {health.version}/{health.steps}{loss}{pace}, peers per stage {peers}")
            self._version, self._said_at = health.version, health.at


def _sort(alert: Alert) -> str:
    """The same while only its numbers change: `no trainer for 40 s`, `no trainer for 41 s`."""
    return "".join(c for c in alert.text if not c.isdigit()) + f"{alert.stage} {alert.peer}"
