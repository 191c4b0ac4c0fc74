"""Write little tales, and others that no training sees: the text of docs/recipes/tales*.toml.

python scripts/tales.py DIR              # DIR/train.txt (20 MB), DIR/held-out.txt
python scripts/tales.py DIR --tales 4000
"""

from __future__ import annotations

import argparse
from pathlib import Path

from swarm import tales


def main(arguments: list[str] | None = None) -> None:
    text, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=text, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--tales", type=int, default=40_000, help="to train on (default: %(default)s)")
    options = parser.parse_args(arguments)
    told, all_ = tales.text(options.tales), tales.text(options.tales + max(1, options.tales // 40))
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train.txt", told), ("held-out.txt", all_[len(told) :].lstrip())):
        (options.folder / name).write_bytes(part)
        print(f"{options.folder / name}: {len(part):,} bytes")


if __name__ == "__main__":
    main()
