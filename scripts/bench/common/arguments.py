"""What the command lines of all benchmarks have in common."""

from __future__ import annotations

import argparse


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the text of a script: its first paragraph before the options, the rest after."""
    text, _, rest = (doc or "").partition("\n\n")
    return argparse.ArgumentParser(
        description=text, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
