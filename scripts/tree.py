"""The source tree in docs/architecture.md, written from the modules' docstrings.

python scripts/tree.py             write it
python scripts/tree.py --check     fail if it is not up to date
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
WIDTH = 40


def tree(package: str) -> str:
    """A line for each module of a package and each folder: its path and its docstring's first sentence."""
    lines: list[str] = []
    for path in sorted((ROOT / package).rglob("*.py"), key=_order):
        name = str(path.relative_to(ROOT))
        if path.name == "__init__.py":
            name = name.removesuffix("__init__.py")
            lines += [""] if lines else []
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        sentence = re.split(r"(?<=[^.])\.(?:\s|$)", text.partition("\n\n")[0].replace("\n", " "), maxsplit=1)[
            0
        ]
        lines.append(f"{name:{WIDTH}}{sentence}".rstrip())
    return "\n".join(lines)


def _order(path: Path) -> tuple[Path, bool, str]:
    return path.parent, path.name != "__init__.py", path.name


def page(text: str) -> str:
    """The page with the trees of today."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}\n```\n{tree(found[2])}\n```\n{found[3]}"

    return re.sub(r"(<!-- tree:(\w+) -->).*?(<!-- end -->)", block, text, flags=re.DOTALL)


def main() -> int:
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
