#!/usr/bin/env python
"""Watch a run: `swarm dashboard` with the arguments given.

    scripts/dashboard.py --run 5a7c... --join ADDR                  # in this terminal
    scripts/dashboard.py --run 5a7c... --join ADDR --web :8080      # a web page, for this machine
    scripts/dashboard.py --replay history.jsonl --speed 10
"""

import sys

from peers.cli import main

if __name__ == "__main__":
    sys.exit(main(["dashboard", *sys.argv[1:]]))
