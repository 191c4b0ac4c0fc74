"""How far long work is: a bar that is drawn over in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io
import itertools

from peers.progress import LINE_S, Bar, spending


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_says_how_much_is_done() -> None:
    bar = Bar("exporting", 100_000_000, stream=io.StringIO())
    bar(20_000_000)
    assert bar.words() == "exporting [####................] 20.0 of 100.0 MB"
    bar(200_000_000)  # a total that was a guess is never passed
    assert bar.words() == "exporting [####################] 100.0 of 100.0 MB"
    assert Bar("evaluating", 8, unit="samples", stream=io.StringIO()).words().endswith("] 0 of 8 samples")
    assert Bar("nothing", 0, stream=io.StringIO()).words().endswith("0.0 of 0.0 MB")


def test_in_a_terminal_it_is_one_line_that_goes_away() -> None:
    out = Terminal()
    with Bar("reading", 4, unit="files", stream=out, clock=itertools.count().__next__) as bar:
        bar(1)
        bar(3)
    assert out.getvalue() == (
        "\rreading [#####...............] 1 of 4 files\rreading [####################] 4 of 4 files\r\x1b[K"
    )


def test_elsewhere_short_work_says_nothing_and_long_work_a_line() -> None:
    out = io.StringIO()
    with Bar("reading", 4, unit="files", stream=out) as bar:
        bar(1)
    assert out.getvalue() == ""
    with Bar("reading", 4, unit="files", stream=out, clock=itertools.count(step=LINE_S).__next__) as bar:
        bar(1)
    assert out.getvalue() == "reading [#####...............] 1 of 4 files\n"


def test_cpu_seconds_are_shown_as_they_are_asked_for() -> None:
    out, spent = Terminal(), iter([7.0, 7.4, 8.1, 30.0]).__next__
    with spending("searching", 4.5, stream=out, spent=spent) as spent_s:
        assert [round(spent_s(), 1) for _ in range(3)] == [0.4, 1.1, 23.0]
    assert "\rsearching [####................] 1 of 5 CPU seconds" in out.getvalue()
