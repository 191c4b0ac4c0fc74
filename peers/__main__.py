"""`swarm`, and `python -m peers`. Ctrl-C while modules are still imported is an end like any other."""

from __future__ import annotations

import sys


def interrupt(number: int, frame) -> None:  # type: ignore
    """Raise KeyboardInterrupt; in an import, which may hide it or crash, end; in a finaliser, try again."""
    import os
    import signal

    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        if frame.f_code.co_name == "__del__":
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> int:
    """Run one subcommand; returns the exit code."""
    try:
        import signal

        # A shell's `&` has SIGINT ignored, and the first process of a container gets only what it handles.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # of nohup
                signal.signal(number, interrupt)
        import peers.cli

        return peers.cli.main()
    except KeyboardInterrupt:
        return 130  # `Exit.STOPPED`, which may not be there yet


if __name__ == "__main__":
    sys.exit(main())
