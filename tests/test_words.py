"""The project's words: one per idea (the glossary in `swarm/__init__.py`), in plain English.

Identifiers must not contain a retired word, and a docstring's first line names its actors by nouns.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

RETIRED = {
    "brief": "directive",
    "briefs": "directive",
    "brought": "custom model",
    "chained": "reference pipeline",
    "chief": "coordinator",
    "conductor": "run coordinator",
    "council": "step coordination",
    "courier": "latest-value sender",
    "crossing": "stage input",
    "crossings": "stage inputs",
    "desk": "server",
    "doubt": "inconsistency",
    "doubts": "inconsistency",
    "draws": "seeded random",
    "envelope": "signed record",
    "envelopes": "signed records",
    "era": "generation",
    "eras": "generations",
    "farewell": "leaving",
    "gauge": "estimator",
    "handover": "handoff",
    "look": "observation",
    "looks": "observations",
    "mate": "replica",
    "mates": "replicas",
    "news": "report trigger",
    "observer": "aggregator",
    "pacer": "rate limiter",
    "patience": "adaptive timeout",
    "piece": "stage module",
    "pieces": "stage modules",
    "roll": "membership",
    "saver": "writer",
    "settle": "to_float",
    "shelf": "checkpoint store",
    "shelves": "checkpoint stores",
    "standing": "position",
    "survey": "lookup",
    "turns": "fair queue",
    "way": "link latency",
    "ways": "link latency",
    "whereabouts": "network coordinates",
    "wish": "command",
    "wishes": "commands",
}
"""Old word -> what it is called now."""

PRONOUNS = re.compile(r"\b(who|whoever|whom|somebody|nobody|anybody)\b", re.IGNORECASE)
IN_A_DOCSTRING = re.compile(rf'"""[^\n]*{PRONOUNS.pattern}', re.IGNORECASE)

VAGUE = re.compile(r"\b(whoever|whom|somebody|anybody)\b|\bWho [a-z]+")
"""Actors without a noun, anywhere in the shipped code: "who asks" may be a caller, a reader or a process."""

STANDARD = ("one_way", "Gauge", "gauge")
"""Terms of others that hold a retired word: a one-way cut, a gauge of Prometheus."""

OTHER_SIDES = ("peers/events.py", "peers/sim/", "peers/api/")
"""What happens to a thing, how it is simulated, and how users see it has its name."""


def split_words(identifier: str) -> list[str]:
    """The lower-case words of a snake_case or CamelCase name."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)]


@cache
def retired_in(name: str) -> list[str]:
    """The retired words in a name."""
    plain = reduce(lambda left, term: left.replace(term, ""), STANDARD, name)
    return [word for word in split_words(plain) if word in RETIRED]


def names_of(node: ast.AST) -> Iterator[str]:
    """Identifiers that a node itself holds."""
    for value in vars(node).values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (one for one in value if isinstance(one, str))


def findings(path: Path) -> Iterator[str]:
    """Retired words in the names of a file, and pronouns for actors in its docstrings' first lines."""
    source = path.read_text(encoding="utf-8")
    for found in VAGUE.finditer(source):
        yield f"{path.relative_to(ROOT)}: name the actor instead of {found[0]!r}"
    if not (IN_A_DOCSTRING.search(source) or any(map(retired_in, {path.stem, *re.findall(r"\w+", source)}))):
        return  # no need to parse it
    nodes = list(ast.walk(ast.parse(source)))
    names = {name for node in nodes if not isinstance(node, ast.Constant) for name in names_of(node)}
    for name in sorted(names | {path.stem}):
        for word in retired_in(name):
            yield f"{path.relative_to(ROOT)}: {name}: {word} is called {RETIRED[word]} now"
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if found := PRONOUNS.search(first):
                yield f"{path.relative_to(ROOT)}: name the actor instead of {found[0]!r}: {first}"


@cache
def all_findings() -> list[str]:
    """Of all shipped code."""
    paths = sorted(path for top in ("swarm", "peers") for path in (ROOT / top).rglob("*.py"))
    return [text for path in paths for text in findings(path)]


def test_no_retired_word_is_used() -> None:
    found = all_findings()
    assert not found, "\n".join(found)


def test_no_two_public_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(path for top in ("swarm", "peers") for path in (ROOT / top).rglob("*.py")):
        place = str(path.relative_to(ROOT))
        if not place.startswith(OTHER_SIDES):
            for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE):
                places.setdefault(name, []).append(place)
    assert len(places) > 500
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_the_finder_finds_words_in_every_style_of_name() -> None:
    assert split_words("AskSavedMates2") == ["ask", "saved", "mates"]
    assert split_words("_has_a_mate") == ["has", "a", "mate"]
    assert split_words("MAX_PER_TURN") == ["max", "per", "turn"]
    assert PRONOUNS.search("Whoever comes first.") and not PRONOUNS.search("The whole run.")


def test_the_glossary_has_no_retired_word() -> None:
    glossary = (ast.get_docstring(ast.parse((ROOT / "swarm" / "__init__.py").read_text())) or "").split(
        "Glossary", 1
    )[1]
    terms = {line.split()[0] for line in glossary.splitlines() if re.match(r" {4}\S", line)}
    assert len(terms) > 30 and not terms & RETIRED.keys()
