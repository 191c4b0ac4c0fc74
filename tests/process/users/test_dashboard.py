"""The dashboard of a real swarm in a real browser: somebody is killed, and the page tells."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from peers.events import Note
from swarm.manifest import Run, audit_run
from tests.process.swarm_processes import Swarm
from tests.watch.browser import needs_browser, visit

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


def small() -> Run:
    """Steps without arithmetic to speak of."""
    return replace(audit_run(stages=3, steps=100_000, microbatches_per_step=16), checkpoint_every=0)


@contextmanager
def dashboard(swarm: Swarm, *extra: str) -> Iterator[str]:
    """`swarm dashboard` of that swarm; yields the address of its page."""
    words = [sys.executable, "-m", "peers", "dashboard", *swarm.membership(), "--web", ":0", *extra]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ.copy()) as program:
        try:
            assert program.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+/", program.stdout.readline())
            assert found
            yield found[0]
            program.send_signal(signal.SIGINT)
            assert program.wait(30) == 130
        finally:
            program.kill()


def step_of(text: str) -> int:
    return int(text.split("/")[0])


@needs_browser
def test_a_kill_is_seen_and_the_death_of_the_bootstrap_changes_nothing(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    with Swarm(tmp_path, small()) as swarm:
        bootstrap = swarm.bootstrap()
        swarm.peers(2)
        swarm.trainer()
        swarm.until_version(2)
        peers = [program for stage in range(3) for program in swarm.serving(stage)]
        doomed = swarm.serving(2)[0]
        with dashboard(swarm, "--record", str(history)) as address, visit(address) as seen:
            page = seen.page
            for program in peers:
                page.wait_for_selector(f'[data-peer="{program.peer_id}"].serving')
            page.wait_for_selector(".topology line.work", state="attached")
            page.wait_for_selector(".topology .trainer")
            page.wait_for_function("document.querySelector('[data-stat=\"tokens/s\"]').innerText != '–'")
            plot = page.locator(".plot").nth(1)
            step, drawn = step_of(page.inner_text('[data-stat="step"]')), plot.screenshot()

            swarm.kill(doomed)
            page.wait_for_selector("text=stage 2 has one peer left")
            page.wait_for_selector(f'[data-peer="{doomed.peer_id}"]', state="detached")
            assert f"peer {doomed.peer_id[-6:]} of stage 2 is lost" in page.inner_text("body")
            page.wait_for_selector(f'[data-peer="{peers[0].peer_id}"].serving')
            assert plot.screenshot() != drawn
            assert step_of(page.inner_text('[data-stat="step"]')) > step

            swarm.kill(bootstrap)
            newcomer = swarm.peer(2, "--metrics", ":0")
            page.wait_for_selector("text=stage 2 has one peer left", state="detached")
            later = step_of(page.inner_text('[data-stat="step"]'))
            page.wait_for_function(
                f"parseInt(document.querySelector('[data-stat=\"step\"]').innerText) > {later + 2}"
            )
            page.goto(f"{address}peer/{peers[0].peer_id}")
            page.wait_for_selector("text=audited")
            seen.assert_clean()
            with urllib.request.urlopen(f"{address}api/health", timeout=30) as answer:
                told = json.loads(answer.read())
            assert [stage["serving"] for stage in told["stages"]] == [2, 2, 2]
            assert told["refused"] == {}
            assert [
                doubt for stage in told["stages"] for peer in stage["peers"] for doubt in peer["doubts"]
            ] == []
        assert len(history.read_bytes().splitlines()) > 20
        said = next(note.text for note in newcomer.heard(Note) if note.text.startswith("metrics at "))
        with urllib.request.urlopen(said.removeprefix("metrics at "), timeout=30) as answer:
            numbers = dict(
                line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#"
            )
        assert float(numbers["swarm_role_stage"]) == 2
        assert float(numbers["swarm_role_steps_total"]) > 0
