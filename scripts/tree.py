"""The pages that are made from the code: the tree in docs/architecture.md, and docs/reference.md.

python scripts/tree.py             write them
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # what is here, not what is installed

from scripts import reference  # noqa: E402

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


def pages() -> dict[Path, str]:
    """Each page, as it has to be today."""
    return {PAGE: page(PAGE.read_text(encoding="utf-8")), reference.PAGE: reference.page()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
