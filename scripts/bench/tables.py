"""Make the pages of docs/benchmarks/ from the JSON files beside them: no figure is edited in Markdown.

    python scripts/bench/tables.py                  # write all pages, and the six numbers in README.md
    python scripts/bench/tables.py --check          # exit code 1 if one is out of date
    scripts/bench/wire/wire.py | scripts/bench/tables.py --store wire --command "scripts/bench/wire/wire.py"

A file is a topic: `title`, `about`, and `tables`. A table has

    title, date, machine, command, commit   where its figures come from; `commit` may be null
    columns                                 {key: heading}; "" as heading: not shown
    rows                                    [{key: value}]; with `missed`: true if a goal was missed
    notes                                   paragraphs below it

`--store` puts the rows that a benchmark prints in its last line in the place of the topic's first table that
has the same `command`, or after the others. `headline` names six rows, for the README.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
README = ROOT / "README.md"
BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
NOTICE = "<!-- Made by scripts/bench/tables.py from {name}.json: change that file and run the script. -->"
NOT_TOPICS = frozenset({"loss-curve"})
"""JSON files that are data of something else; see `loss_curve.py`."""


def topics() -> dict[str, dict[str, Any]]:
    """Name -> content of each topic, in the order of the index."""
    found = {
        path.stem: json.loads(path.read_text())
        for path in sorted(FOLDER.glob("*.json"))
        if path.stem not in NOT_TOPICS
    }
    return dict(sorted(found.items(), key=lambda item: item[1]["order"]))


# --- Markdown ---


def page(name: str, topic: dict[str, Any]) -> str:
    """The page of one topic."""
    parts = [NOTICE.format(name=name), f"# {topic['title']}", *topic["about"]]
    for table in topic["tables"]:
        parts += [f"## {table['title']}", source(table), markdown_table(table), *table.get("notes", [])]
    return "\n\n".join(part for part in parts if part) + "\n"


def source(table: dict[str, Any]) -> str:
    """Where a table's figures come from, in a sentence."""
    command = f" `{table['command']}`" if table["command"] else ""
    commit = f" Commit {table['commit']}." if table["commit"] else ""
    return f"{table['date']}, {table['machine']}.{command}{commit}"


def markdown_table(table: dict[str, Any]) -> str:
    """Rows as a table of Markdown; rows whose goal was missed say so in bold."""
    columns = {key: heading for key, heading in table["columns"].items() if heading}
    lines = [row_line(columns.values()), "|" + "---|" * len(columns)]
    for row in table["rows"]:
        cells = {key: shown(row.get(key)) for key in columns}
        if row.get("missed"):
            cells["goal"] = f"**{cells['goal']} (missed)**"
        lines.append(row_line(cells.values()))
    return "\n".join(lines)


def row_line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def index(found: dict[str, dict[str, Any]]) -> str:
    """The first page: the topics, and every goal that was missed."""
    parts = [
        NOTICE.replace("from {name}.json: change that file", "from the JSON files beside it: change one"),
        "# Benchmarks",
        "Each page is made of the JSON file with its name. Every table says when and where it was measured, "
        "and by which command. A goal that was missed stays in bold until it is met. The machines are shared "
        "and noisy: *busy* means that other programs took more than half of the machine meanwhile.",
        "\n".join(f"- [{topic['title']}]({name}.md): {topic['summary']}" for name, topic in found.items()),
        "## Goals missed",
    ]
    missed = [
        f"- [{topic['title']}]({name}.md): {row['what']}: goal {row['goal']}; measured {row['measured']}"
        for name, topic in found.items()
        for row in rows_of(topic)
        if row.get("missed")
    ]
    parts += ["\n".join(missed), "The picture in the README is drawn by `scripts/bench/loss/loss_curve.py` "
              "from [loss-curve.json](loss-curve.json)."]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def rows_of(topic: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for table in topic["tables"]:
        yield from table["rows"]


def headlines(found: dict[str, dict[str, Any]]) -> str:
    """The six numbers of the README."""
    rows = [
        (row["headline"]["order"], f"| {row['headline']['what']} | {row['headline']['measured']} | [{name}]"
         f"(docs/benchmarks/{name}.md) |")
        for name, topic in found.items()
        for row in rows_of(topic)
        if "headline" in row
    ]  # fmt: skip
    lines = [line for _, line in sorted(rows)]
    return "\n".join(["| what | measured | all of it |", "|---|---|---|", *lines])


def pages() -> dict[Path, str]:
    """Every generated file, with what should be in it."""
    found = topics()
    made = {FOLDER / f"{name}.md": page(name, topic) for name, topic in found.items()}
    made[FOLDER / "README.md"] = index(found)
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    made[README] = f"{before}{BEGIN}\n{headlines(found)}\n{END}{after}"
    return made


# --- a benchmark's output ---


def store(name: str, command: str, title: str, output: str) -> None:
    """Put the rows of a benchmark's last line into the topic's file."""
    from scripts.bench.common.harness import machine

    rows = json.loads(output.strip().splitlines()[-1])["rows"]
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    table = {
        "title": title or command, "date": time.strftime("%Y-%m-%d"), "machine": machine(),
        "command": command, "commit": told.stdout.strip(),
        "columns": {key: key.replace("_", " ") for key in rows[0]}, "rows": rows,
    }  # fmt: skip
    path = FOLDER / f"{name}.json"
    topic = json.loads(path.read_text())
    for at, old in enumerate(topic["tables"]):
        if old["command"] == command:
            kept = {key: old[key] for key in ("title", "notes", "columns") if key in old}
            topic["tables"][at] = {**table, **kept}
            break
    else:
        topic["tables"].append(table)
    write_json(path, topic)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is old")
    parser.add_argument("--store", metavar="TOPIC", help="read a benchmark's output, and keep its rows")
    parser.add_argument("--command", default="", help="how the benchmark was called")
    parser.add_argument("--title", default="", help="of a new table")
    options = parser.parse_args()
    if options.store:
        store(options.store, options.command, options.title, sys.stdin.read())
    old = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    for path in old:
        print(f"{'out of date' if options.check else 'wrote'}: {path.relative_to(ROOT)}")
        if not options.check:
            path.write_text(pages()[path])
    return 1 if options.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
