#!/usr/bin/env python3
"""Watch a run: `swarm dashboard` with the arguments given.

scripts/dashboard.py --run 5a7c... --join ADDR                  # in this terminal
scripts/dashboard.py --run 5a7c... --join ADDR --web :8080      # a web page, for this machine
scripts/dashboard.py --replay history.jsonl --speed 10
"""

import os
import sys
from pathlib import Path

SWARM = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "swarm"

if __name__ == "__main__":
    if not SWARM.exists():
        sys.exit("nothing is installed in this clone yet: run scripts/setup")
    os.execv(SWARM, [str(SWARM), "dashboard", *sys.argv[1:]])
