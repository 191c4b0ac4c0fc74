"""The web page: of recorded histories, by HTTP and in a real browser. A real swarm is in tests/process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from peers.programs.tool_options import DashboardOptions
from peers.watch import dashboard
from peers.watch.dashboard import run_dashboard
from peers.watch.history import Recorder
from swarm.errors import SetupError
from swarm.manifest import demo_run
from swarm.monitoring.aggregator import Aggregator
from swarm.monitoring.health import Observation
from tests.watch.browser import needs_browser, visit
from tests.watch.pictures import RUN, START, record, status

EVIL = "<img src=x onerror=document.title='me'>"


@contextlib.contextmanager
def shown(path: Path, complaints: int | None = None) -> Iterator[str]:
    """A dashboard that plays a history, as a process: NiceGUI has one app for each."""
    replay = ["dashboard", "--replay", str(path), "--speed", "1e6", "--web", ":0"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-m", "peers", *replay],
        stdout=subprocess.PIPE,
        stderr=complaints,
        text=True,
        env=env,
        cwd=path.parent,
    ) as program:
        try:
            assert program.stdout is not None
            said = program.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/", said)
            assert found, said
            yield found[0]
            program.send_signal(signal.SIGINT)
            assert program.wait(20) == 130
        finally:
            program.kill()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two stages and a half: one peer is dead, another writes HTML wherever it can."""
    path = tmp_path_factory.mktemp("history") / "history.jsonl"
    with Recorder(path, RUN) as take:
        wild = msgspec.structs.replace(record("peer-w", 2), device=EVIL)
        peers = (record("peer-a", 0), record("peer-b", 0), record("peer-c", 1), wild)
        take(Observation(at=START, records=peers, refused={EVIL: 1}))
        for version in range(1, 8):
            told = [status("peer-a", 0, version, to=("peer-c", "trainer")), status("peer-c", 1, version)]
            told += [msgspec.structs.replace(status("peer-w", 2, version), rebalance=EVIL)]
            take(Observation(at=START + 2 * version, statuses=tuple(told), silent={"peer-b": EVIL}))
    with shown(path) as where:
        yield where
    assert sorted(p.name for p in path.parent.iterdir()) == ["history.jsonl"]  # nothing is left beside it


def fetched(url: str) -> tuple[int, str, str]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.status, answer.headers["content-type"], answer.read().decode()


@pytest.mark.process
def test_the_picture_is_there_as_plain_json(address: str) -> None:
    until = time.monotonic() + 60.0
    while True:  # the recording plays while the page is up
        code, kind, text = fetched(f"{address}api/health")
        assert (code, kind) == (200, "application/json")
        told = json.loads(text)
        if told["version"] == 7 or time.monotonic() > until:
            break
        time.sleep(0.1)
    assert (told["run"], told["version"], told["stages"][0]["serving"]) == (RUN.id, 7, 1)
    assert told["stages"][2]["peers"][0]["device"].startswith("<img")


@pytest.mark.process
def test_the_labels_under_a_plot_make_room_for_one_another_on_a_phone(address: str) -> None:
    assert fetched(address)[2].count("hideOverlap") == 2


@pytest.mark.process
def test_nothing_can_be_changed(address: str) -> None:
    for path in ("api/health", ""):
        for method in ("POST", "PUT", "DELETE"):
            request = urllib.request.Request(address + path, data=b"{}", method=method)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=30)
            with refused.value as answer:
                assert answer.code in (404, 405)


@pytest.mark.process
def test_the_page_names_no_other_host_and_is_for_this_machine_only(address: str) -> None:
    code, kind, text = fetched(address)
    assert code == 200 and kind.startswith("text/html")
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", text)
    port = int(address.rsplit(":", 1)[1].strip("/"))
    with socket.socket() as other:
        other.settimeout(5)
        with pytest.raises(OSError):
            other.connect(("127.0.0.2", port))


@pytest.mark.process
def test_who_comes_by_a_name_of_another_is_refused(address: str) -> None:
    """A web page may have its own name lead to this machine, and would read the answer (DNS rebinding)."""
    port = address.rpartition(":")[2].strip("/")
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[::1", ""):
        for path in ("", "api/health", "_nicegui_ws/socket.io/?EIO=4&transport=polling"):
            request = urllib.request.Request(address + path, headers={"Host": host})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=30)
            with refused.value as answer:
                assert answer.code == 421 and b"open it by an address, such as http://" in answer.read()
    for host in ("localhost", f"LocalHost:{port}", f"[::1]:{port}", "192.0.2.7", "swarm.localhost"):
        request = urllib.request.Request(f"{address}api/health", headers={"Host": host})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200


@pytest.mark.process
def test_silent_visitors_do_not_take_all_files(address: str) -> None:
    """Of 1024 none was left: the dashboard could ask no peer, and had no number for Prometheus."""
    with contextlib.ExitStack() as stack:
        there = ("127.0.0.1", int(address.rsplit(":", 1)[1].strip("/")))
        opened = [stack.enter_context(socket.create_connection(there)) for _ in range(340)]
        asking = opened[::8]
        silent = [one for one in opened if one not in asking]
        for one in asking:
            one.sendall(b"GET / HTTP/1.1\r\n")
        end = time.monotonic() + 20
        while len(select.select(silent, [], [], 0.05)[0]) < 80:
            assert time.monotonic() < end
        assert not select.select(asking, [], [], 0.0)[0], "who asks for something stays"
    assert fetched(f"{address}api/health")[0] == 200


@pytest.mark.process
def test_visitors_write_nothing_on_the_terminal(tmp_path: Path) -> None:
    path, said = tmp_path / "history.jsonl", tmp_path / "stderr"
    with Recorder(path, RUN) as take:
        take(Observation(at=START, records=(record("peer-a", 0),)))
    with said.open("wb") as complaints, shown(path, complaints.fileno()) as address:
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(f"{address}%1b%5b31mred")  # decoded, it turns the terminal red
        refused.value.close()
        port = int(address.rstrip("/").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"\x1b[31mred\r\n\r\n")
            assert line.recv(64).startswith(b"HTTP/1.1 400 ")
    assert said.read_bytes() == b""


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    Recorder(path, RUN).__exit__(None, None, None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = f"cannot serve the web page at 127.0.0.1:{port}: Address already in use. Choose another port"
        with pytest.raises(SetupError, match=text):
            await run_dashboard(DashboardOptions(replay=path, web=("127.0.0.1", port)))


async def test_without_nicegui_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("peers.watch.") and "dashboard" not in name]:
        monkeypatch.delitem(sys.modules, name)
    import peers.watch

    monkeypatch.delattr(peers.watch, "web", raising=False)
    monkeypatch.setitem(sys.modules, "nicegui", None)
    with pytest.raises(SetupError, match=r"--web needs nicegui: pip install 'swarm-train\[dashboard\]'"):
        async with dashboard._faces(DashboardOptions(web=("127.0.0.1", 0)), dashboard.Board(RUN)):
            pass


# --- in a browser -------------------------------------------------------------------------------------------


@pytest.mark.process
@needs_browser
def test_the_page_shows_the_run_and_what_strangers_write_stays_text(address: str) -> None:
    with visit(address) as seen:
        page = seen.page
        page.wait_for_selector('[data-peer="peer-b"].silent')
        assert page.inner_text('[data-stat="step"]') == "7 / 40"
        assert page.inner_text('[data-stat="peers"]') == "3 of 4"
        assert f"peer peer-b does not answer: {EVIL}" in page.inner_text('[data-part="alerts"]')
        body = page.inner_text("body")
        assert body.count(EVIL) >= 4  # an alert, the timeline, a device, a move
        assert "Seconds by step" in body and "Contributions" in body
        assert page.title() == "swarm" and page.locator("img[src=x]").count() == 0
        page.click('[data-peer="peer-w"]')
        page.wait_for_url("**/peer/peer-w")
        page.wait_for_selector("text=computed 140 microbatches")
        assert EVIL in page.inner_text("body") and page.locator("img[src=x]").count() == 0
        seen.assert_clean()


@pytest.mark.process
@needs_browser
def test_it_is_dark_or_light_as_the_reader_likes_and_fits_a_phone(address: str) -> None:
    for dark in (True, False):
        with visit(address, width=390, dark=dark) as seen:
            page = seen.page
            page.wait_for_selector('[data-peer="peer-a"]')
            assert page.locator("body.body--dark").count() == dark
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            page.click('[aria-label="dark or light"]')
            page.wait_for_selector("body.body--light" if dark else "body.body--dark")
            seen.assert_clean()


@pytest.mark.process
@needs_browser
@pytest.mark.slow
def test_500_peers_are_shown_and_found(tmp_path: Path) -> None:
    path, run = tmp_path / "history.jsonl", demo_run(stages=8, steps=100)
    names = [f"peer{i:04d}" for i in range(500)]
    with Recorder(path, run) as take:
        take(Observation(at=START, records=tuple(record(n, i % 8, run=run) for i, n in enumerate(names))))
        for version in (1, 2, 3):
            told = (status(n, i % 8, version, to=(names[(i + 1) % 500],)) for i, n in enumerate(names))
            take(Observation(at=START + 5 * version, statuses=tuple(told)))
    with shown(path) as where, visit(where) as seen:
        page = seen.page
        page.wait_for_selector('[data-peer="peer0499"]')
        assert page.locator("[data-peer]").count() == 501
        page.fill('input[placeholder="find"]', "er0321")
        page.wait_for_selector("td:text('er0321')")
        page.click("td:text('er0321')")
        page.wait_for_url("**/peer/peer0321")
        seen.assert_clean()


def test_a_page_holds_each_point_of_a_plot_as_one_object() -> None:
    """NiceGUI watches each list in what it is given: a page of a long run took twice the memory, 1.4 MB."""
    from nicegui import Client
    from nicegui.page import page

    from peers.watch.web import WholeRun

    health = replace(Aggregator(RUN).health(now=START), losses=((1, 2.0), (2, 1.5)), step_times=((1, 0.5),))
    with Client(page("")):
        shown = WholeRun(lambda: health)
    for plot in (shown._loss, shown._step_times):
        assert {type(point) for point in plot._chart.options["series"][0]["data"]} == {tuple}
