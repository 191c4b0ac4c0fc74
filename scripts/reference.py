"""docs/reference.md, written from the code: all commands, variables, exit codes, and keys of a manifest.

python scripts/tree.py             write it, with the other pages that are made from the code
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path

from peers import cli, options
from peers.programs import tool_options
from swarm import manifest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"

VARIABLES = {
    "SWARM_RUN": "as `--run`",
    "SWARM_JOIN": "as `--join`: addresses with spaces between them",
    "SWARM_IDENTITY": "as `--identity`, of programs that others reach",
    "SWARM_TOKEN": "as `--token`, which other users of the machine can read on a command line",
    "SWARM_CACHE": "folder of the cache, not `~/.cache/swarm`",
    "SWARM_RESULTS": "folder of the last versions of finished runs, not `~/.local/share/swarm/results`",
}

TABLES = (
    (manifest.Run, "Before all tables"),
    (manifest.ModelSpec, "[model]"),
    (manifest.CustomModelSpec, '[model] of your own: `kind = "code"` or `"hf"`'),
    (manifest.DataSpec, "[data]"),
    (manifest.BatchSpec, "[batch]"),
    (manifest.OptimizerSpec, "[optimizer]"),
    (manifest.CodecSpec, "[codec]"),
    (manifest.AdmissionSpec, "[admission]"),
    (manifest.StartSpec, "[start]"),
    (manifest.LoraSpec, "[lora]"),
    (manifest.EvalSpec, "[eval]"),
    (manifest.IslandsSpec, "[islands]"),
)

SHARED: dict[str, tuple[type, ...]] = {
    "Every role": (options.ProcessOptions, options.NetworkOptions),
    "Every member of a run": (options.MemberOptions,),
    "Which run": (options.RunOptions,),
    "Which weights": (options.WeightsOptions, tool_options.ModelOptions),
}
"""Arguments of several commands, under one heading instead of at each of them."""


def said(cls: type) -> dict[str, str]:
    """The text below each name of a class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    found: dict[str, str] = {}
    for node, after in itertools.pairwise(body):
        target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        text = getattr(getattr(after, "value", None), "value", None) if isinstance(after, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(text, str):
            found[target.id] = " ".join(text.split())
    return found


def table(heads: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """A table of Markdown."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    names = heads.split("|")
    return [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *lines)] + [""]


def arguments(cls: type, *, but: Iterable[type] = ()) -> list[str]:
    """The arguments of a command, or of a class that several share; without those that it has of `but`."""
    elsewhere = [one for base in but for one in fields(base)]
    rows = []
    for one in fields(cls):
        if any(one is other for other in elsewhere):
            continue
        told = one.metadata
        kind, more = told["kind"], told["more"]
        if told["help"] == argparse.SUPPRESS:
            continue
        values = kind.metavar if kind else "|".join(more.get("choices", ()))
        name = values if told["positional"] else f"{options.flag_of(one.name)} {values}".strip()
        needed = one.default is MISSING and not told["positional"] and "nargs" not in more
        text = told["help"] % {"default": one.default} if "%(default" in told["help"] else told["help"]
        rows.append((f"`{name}`", ("**needed**; " if needed else "") + text))
    return table("argument|meaning", rows) if rows else []


def command(name: str) -> list[str]:
    """What `swarm NAME --help` says."""
    cls = cli.options_of(name)
    text, _, examples = options.description(cls)
    shared = [head for head, classes in SHARED.items() if issubclass(cls, classes)]
    links = ", ".join(f"[{head[0].lower()}{head[1:]}](#{head.lower().replace(' ', '-')})" for head in shared)
    also = [f"Also: {links}.", ""] if links else []
    shown = ["```", *examples, "```", ""]
    of_others = [one for head in shared for one in SHARED[head]]
    return [f"### swarm {name}", "", text, "", *shown, *arguments(cls, but=of_others), *also]


def shared_arguments(heading: str) -> list[str]:
    """What all commands take that link to a heading."""
    tables = [arguments(cls, but=cls.__mro__[1:-2]) for cls in SHARED[heading]]
    rows = [row for lines in tables for row in lines[2:-1]]
    return [f"### {heading}", "", *tables[0][:2], *rows, ""]


def keys(spec: type) -> list[str]:
    """The keys of one table of a manifest."""
    meanings = said(spec)
    rows = []
    for one in fields(spec):
        if (rule := one.metadata.get("rule")) is None:
            continue
        default = "" if one.default is MISSING else f"`{json.dumps(one.default)}`"
        rows.append((f"`{one.name}`", default, rule.allowed, meanings[one.name]))
    return table("key|default|allowed|meaning", rows)


def page() -> str:
    """The page as it has to be today."""
    codes = said(cli.Exit)
    lines = [
        "# Reference",
        "",
        "Made from the code by `python scripts/tree.py`.",
        "",
        "## Exit codes",
        "",
        *table("code|meaning", ((str(int(code)), codes[code.name]) for code in cli.Exit)),
        "## Variables of the environment",
        "",
        "What is typed wins over them.",
        "",
        *table("variable|meaning", ((f"`{name}`", text) for name, text in VARIABLES.items())),
        "## Commands",
        "",
        "Where a command takes `--run` and `--join`, `@join.txt` stands for both: a bootstrap writes that",
        "file with `--join-file`, and nothing else is taken from it. Every command has `--help`, and",
        "`--traceback`, which shows where in the code an error comes from.",
        "",
        *(line for name in cli.COMMANDS for line in command(name)),
        *(line for heading in SHARED for line in shared_arguments(heading)),
        "## Keys of a manifest",
        "",
        "A key without a default must be given. [What a manifest is](manifest.md).",
        "",
    ]
    for spec, heading in TABLES:
        lines += [f"### {heading}", "", *keys(spec)]
    return "\n".join(lines).rstrip("\n") + "\n"
