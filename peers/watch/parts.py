"""Parts of web pages: each is built once, and shows what is new when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nicegui import ui

from peers.watch import topology

CSS = """
.nicegui-content { max-width: 1500px; margin: 0 auto; width: 100%; gap: .8rem; padding: .8rem; }
.q-card { width: 100%; padding: .7rem 1rem; min-width: 0; }
.stats { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: .6rem;
  width: 100%; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: .8rem;
  width: 100%; }
.number { font-size: 1.35rem; font-weight: 600; line-height: 1.3; }
.faint { opacity: .65; font-size: .85rem; }
.title { font-size: 1.15rem; font-weight: 600; }
.head { display: flex; align-items: center; gap: .8rem; width: 100%; flex-wrap: wrap; }
.grow { flex: 1; min-width: 0; overflow-wrap: anywhere; }
.alert { padding: .35rem .7rem; border-radius: .3rem; border-left: 5px solid; overflow-wrap: anywhere;
  width: 100%; }
.alert.error { border-color: #d3342f; background: #d3342f22; }
.alert.warning { border-color: #e0a100; background: #e0a10022; }
.alert.info { border-color: #888; background: #8882; }
.lines { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .9rem; line-height: 1.5;
  max-height: 22rem; overflow-y: auto; width: 100%; }
.plot { height: 15rem; width: 100%; }
.q-table__container { width: 100%; }
"""

GREY = "#8a8a8a"


def div(classes: str) -> ui.element:
    return ui.element("div").classes(classes)


def head(back: bool) -> ui.label:
    """The first line, with the switch between dark and light. Returns the label to its left."""
    ui.add_css(CSS + topology.CSS)
    ui.dark_mode(None)
    with div("head"):
        if back:
            ui.link("← the run", "/")
        label = ui.label().classes("title grow")
        toggle = ui.button(icon="contrast").props('flat round aria-label="dark or light"')
    toggle.on("click", js_handler="() => Quasar.Dark.toggle()")  # only the browser knows what it was
    return label


class Stats:
    """A row of numbers with their names."""

    def __init__(self, *names: str) -> None:
        self._labels: dict[str, ui.label] = {}
        with div("stats"):
            for name in names:
                with ui.card():
                    ui.label(name).classes("faint")
                    self._labels[name] = ui.label("–").classes("number").props(f'data-stat="{name}"')

    def show(self, **numbers: str) -> None:
        for name, text in numbers.items():
            self._labels[name.replace("_", " ")].set_text(text)


class Lines:
    """Lines of text, or a word that there are none."""

    def __init__(self, title: str, none: str) -> None:
        self._none, self._shown = none, ""
        with ui.card():
            ui.label(title).classes("title")
            self._label = ui.label(none).classes("lines")

    def show(self, lines: Sequence[str]) -> None:
        text = "\n".join(lines) or self._none
        if text != self._shown:
            self._label.set_text(text)
            self._shown = text


def _columns(names: Iterable[str]) -> list[dict[str, Any]]:
    return [
        {"name": n, "label": n, "field": n, "sortable": True, "align": "left" if n in LEFT else "right"}
        for n in names
    ]


LEFT = frozenset({"peer", "state", "device", "slowest", "fastest", "last"})


class Table:
    """A table whose rows change; one that leads to the page of its peer if it has one."""

    def __init__(
        self, title: str, columns: Mapping[str, Callable[[Any], object]], *, rows: int, search: bool = False
    ) -> None:
        """`columns`: what stands in each, of one thing; that named `id` is not shown, and names its peer."""
        self._cells, key = columns, "id" if "id" in columns else next(iter(columns))
        with ui.card():
            with div("head"):
                ui.label(title).classes("title grow")
                find = ui.input(placeholder="find").props("dense clearable") if search else None
            self._table = ui.table(
                rows=[],
                columns=_columns(name for name in columns if name != "id"),
                row_key=key,
                pagination=rows,
            ).props("dense flat")
        if find is not None:
            find.bind_value_to(self._table, "filter")
        if key == "id":
            self._table.on(
                "row-click", lambda event: ui.navigate.to(f"/peer/{event.args[1]['id']}"), [None, ["id"]]
            )
            self._table.style("cursor: pointer")

    def show(self, things: Iterable[Any]) -> None:
        rows = [{name: of(thing) for name, of in self._cells.items()} for thing in things]
        if rows != self._table.rows:
            self._table.rows = rows
            self._table.update()


class Plot:
    """A line over its x."""

    def __init__(self, title: str) -> None:
        axis = {"axisLine": {"lineStyle": {"color": GREY}}, "splitLine": {"lineStyle": {"color": "#8883"}}}
        with ui.card():
            ui.label(title).classes("title")
            self._chart = ui.echart(
                {
                    "grid": {"left": 55, "right": 15, "top": 15, "bottom": 30},
                    "textStyle": {"color": GREY},
                    "animation": False,
                    "tooltip": {"trigger": "axis"},
                    "xAxis": {
                        "type": "value",
                        "min": "dataMin",
                        "max": "dataMax",
                        "axisLabel": {"hideOverlap": True},
                        **axis,
                    },
                    "yAxis": {"type": "value", "scale": True, **axis},
                    "series": [{"type": "line", "showSymbol": False, "data": []}],
                }
            ).classes("plot")

    def show(self, points: list[list[float]]) -> None:
        series = self._chart.options["series"][0]
        if points != series["data"]:
            series["data"] = points
            series["showSymbol"] = len(points) == 1
            self._chart.update()
