"""Two thousand swarms, each with its own faults: `scripts/test` plays them while other tests wait.

In a file of its own, since they take some minutes of whatever nothing else wants.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from peers.sim.faults import KINDS

SCHEDULES = 2_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_thousand_schedules_of_faults_change_no_weight() -> None:
    command = [sys.executable, "-m", "peers.sim", "--schedules", str(SCHEDULES), "--jobs", "2"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout
    row = json.loads(told.stdout.splitlines()[-1])["rows"][0]
    faults, checked = Counter(row["faults"]), Counter(row["checked"])
    # A calm world would prove little.
    assert all(faults[kind] > SCHEDULES / 100 for kind in KINDS), faults
    assert row["undone"] > SCHEDULES / 40 and row["replayed"] > SCHEDULES / 2
    assert row["generations"] > SCHEDULES / 200
    assert all(checked[name] > SCHEDULES for name in ("I1", "I2", "I3", "I5", "shared"))
    assert checked["disk"] > SCHEDULES / 20
