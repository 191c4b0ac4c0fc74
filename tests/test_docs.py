"""The README and docs/: commands that work, messages that are really said, links that lead somewhere, pages
made from data that are up to date.

Every command of a page is read: options, files of this repository, arguments of the image. Most of `swarm`
are also run, by tests/process/users/test_docs_run.py.
"""

from __future__ import annotations

import argparse
import ast
import doctest
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import swarm
from peers.cli import Exit, build_parser, takes_join_file
from peers.options import VARIABLES
from scripts import tree
from scripts.bench import tables
from scripts.bench.common.model_sizes import parameter_count
from scripts.bench.loss import loss_curve
from scripts.tales import main as write_tales
from swarm import tales
from swarm.manifest import (
    PRESETS,
    CustomModelSpec,
    DataSpec,
    Run,
    load_run,
    parse_run,
    tomllib,
)
from tests.example import example_run

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("home", "join", "public-run", "spot", "security", "troubleshooting")),
    *(f"docs/{name}.md" for name in ("manifest", "own-model", "planning", "python", "watching")),
    "CONTRIBUTING.md",
)
"""Those with commands."""
JOIN_FILE = "@join.txt"
RUN = "0123456789abcdef" * 2
ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHERS = frozenset({"timedatectl", "sudo", "head"})
"""Programs that are not ours, with commands too short to be wrong."""
DOCKER = {
    "build": {"-t": 1, "--build-arg": 1},
    "run": {
        "--rm": 0, "-d": 0, "-v": 1, "-p": 1, "--name": 1, "--gpus": 1, "--stop-timeout": 1, "--restart": 1,
        "--read-only": 0, "--tmpfs": 1, "--cap-drop": 1, "--security-opt": 1, "--network": 1, "--pid": 1,
    },
    "logs": {"-f": 0}, "exec": {}, "stop": {"--time": 1}, "start": {}, "restart": {"--time": 1},
    "compose": {"--file": 1, "--build": 0, "--scale": 1, "--volumes": 0},
}  # fmt: skip
"""The options of Docker that the pages use, and how many words each takes."""


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return [text for name, text in FENCE.findall((ROOT / page).read_text()) if name == language]


def commands(page: str) -> list[list[str]]:
    """Every command of a page's shell blocks, as words; placeholders are filled in."""
    found = []
    for line in "".join(blocks(page, "sh")).splitlines():
        filled = line.replace("RUN_ID", RUN).replace("ADDRESS", ADDRESS).partition(" > ")[0]
        if words := shlex.split(filled, comments=True):
            found.append(words)
    return found


COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


def named(value: str | list[str]) -> str:
    """A parameter in a test's name."""
    return value if isinstance(value, str) else " ".join(value)[:60]


@cache
def our_parser() -> argparse.ArgumentParser:
    """Made once: that takes longer than to read a command."""
    return build_parser()


def parses(words: list[str]) -> None:
    """The words after `swarm` are a command line of ours. A join file is taken to be there."""
    joining = ["--run", RUN, "--join", ADDRESS]
    if any(word in (JOIN_FILE, "@/join.txt") for word in words):
        assert takes_join_file(words[0]), f"swarm {words[0]} reads no join file"
    filled: list[str] = []
    for word in words:
        filled += joining if word in (JOIN_FILE, "@/join.txt") else [word]
    assert our_parser().parse_args(filled).command == words[0]


def after_options(words: list[str], takes: dict[str, int]) -> list[str]:
    """What follows the options of `docker …`."""
    while words and words[0].startswith("-"):
        assert words[0] in takes, f"is {words[0]} an option of Docker?"
        words = words[1 + takes[words[0]] :]
    return words


def of_image(words: list[str], tmp_path: Path) -> list[str]:
    """What the image's entry point makes of its arguments."""
    fake = tmp_path / "swarm"
    fake.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = subprocess.run(
        [ROOT / "scripts" / "entrypoint", *words],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return said.stdout.splitlines()


def test_every_page_has_commands_and_is_linked_from_the_readme() -> None:
    assert {page for page, _ in COMMANDS} == set(PAGES)
    assert {page for page in MARKDOWN if blocks(page, "sh")} == set(PAGES)
    readme = (ROOT / "README.md").read_text()
    for page in PAGES[1:]:
        assert f"({page})" in readme


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=named)
def test_a_command_of_a_page_is_one(page: str, words: list[str], tmp_path: Path) -> None:
    program, *rest = words
    if program == ".venv/bin/swarm":
        parses(rest)
    elif program == "scripts/demo":
        parses(["demo", *rest])
    elif program == "docker":
        verb, *rest = rest
        rest = after_options(rest, DOCKER[verb])
        if verb == "run":
            image, *rest = rest
            assert image in ("swarm", "swarm:cuda")
            parses(of_image(rest, tmp_path))
        elif verb == "exec":
            assert rest.pop(0) == "peer"
            assert rest.pop(0) == "swarm"
            parses(rest)
        elif verb == "compose":
            assert rest[0] in ("up", "down")
            after_options(rest[1:], DOCKER[verb])
        else:
            assert rest
        for flag, value in itertools.pairwise(words):
            if flag == "--build-arg":
                assert f"ARG {value.partition('=')[0]}" in (ROOT / "Dockerfile").read_text()
            if flag == "--file":
                assert (ROOT / value).is_file()
    elif program == ".venv/bin/python":  # which a clone without scripts/setup lacks
        assert (ROOT / rest[0]).is_file()
    elif program not in OTHERS:
        assert (ROOT / program).is_file(), f"{page}: what is {program}?"


def test_the_unit_of_systemd_starts_what_is_a_command() -> None:
    (unit,) = blocks("docs/spot.md", "ini")
    (line,) = re.findall(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)
    parses(shlex.split(line.replace("RUN_ID", RUN).replace("ADDRESS", ADDRESS)))
    (patience,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    (within,) = re.findall(r"--leave-within (\d+)", line)
    assert int(patience) > int(within)
    assert "\nKillMode=mixed\n" in unit, "p2pd would end before its peer has left"
    assert "\nWants=network-online.target\n" in unit, "After= alone waits for what nothing starts"


def test_the_image_for_gpus_is_given_some() -> None:
    """Without them its peer takes the CPU, and says so in one line of its log."""
    runs = [words for page, words in COMMANDS if words[:2] == ["docker", "run"] and "swarm:cuda" in words]
    assert runs
    assert all("--gpus" in words for words in runs)


# --- the image ---


@pytest.mark.parametrize(("device", "taken"), [("cpu", "2.13.0+cpu"), ("cuda", "2.13.0")])
def test_the_image_takes_the_torch_of_its_device_and_no_other(
    device: str, taken: str, tmp_path: Path
) -> None:
    """An index may have both builds, and `==2.13.0` takes either."""
    pins = (ROOT / "constraints.txt").read_text()
    (tmp_path / "constraints.txt").write_text(pins)
    (edit,) = re.findall(rf"^ +{device}\) (sed -i '[^']*' constraints.txt)", dockerfile(), re.MULTILINE)
    subprocess.run(edit, shell=True, check=True, cwd=tmp_path)
    edited = (tmp_path / "constraints.txt").read_text()
    assert len(edited.splitlines()) == len(pins.splitlines())
    (pin,) = [Requirement(line) for line in edited.splitlines() if line.startswith("torch=")]
    assert [version for version in ("2.13.0", "2.13.0+cpu") if version in pin.specifier] == [taken]


@pytest.mark.parametrize(
    ("device", "cuda", "ends"),
    [("cpu", None, ""), ("cuda", "13.0", ""), ("cuda", None, "this torch is for cpu, not for cuda"),
     ("cpu", "13.0", "this torch is for cuda130, not for cpu")],
)  # fmt: skip
def test_the_image_is_not_built_with_the_torch_of_another_device(
    device: str, cuda: str | None, ends: str, tmp_path: Path
) -> None:
    (look,) = re.findall(r"&& (built=.*\n) +&& (case .* esac)", dockerfile())
    (tmp_path / "torch.py").write_text(f"class version: cuda = {cuda!r}\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = look[0].rstrip("\\\n ") + "\n" + look[1]
    done = subprocess.run(
        ["sh", "-euc", script], capture_output=True, text=True,
        env={"PATH": path, "DEVICE": device, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (1 if ends else 0, ends)


def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text()


# --- compose ---


def test_compose_starts_what_there_is(tmp_path: Path) -> None:
    compose = yaml.safe_load(text := (ROOT / "scripts" / "compose.yaml").read_text())
    assert not [name for name in VARIABLES if name in text], "of a run that its user joins"
    join = tmp_path / "join"
    join.write_text(f"--run\n{RUN}\n--join\n{ADDRESS}\n")
    assert set(compose["services"]) == {"bootstrap", "peer", "trainer", "keeper", "dashboard"}
    for name, service in compose["services"].items():
        words = [word.replace("@/join/join", f"@{join}") for word in service["command"]]
        parses(of_image(words, tmp_path))
        named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith("$")}
        assert named <= set(compose["volumes"])
        keeps = [volume for volume in service["volumes"] if volume.startswith("bootstrap:")]
        assert keeps == (["bootstrap:/data"] if name == "bootstrap" else []), "its private key is there"
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert (name == "bootstrap") == ("depends_on" not in service)
    seconds = int(compose["services"]["peer"]["stop_grace_period"].rstrip("s"))
    assert seconds > float(compose["services"]["peer"]["command"][-1])
    assert load_run(ROOT / "scripts" / "local.toml").S == 2


# --- messages ---


@cache
def templates() -> list[str]:
    """Every text in the code, with `…` for each part that is filled in."""
    found = [
        "the following arguments are required: …",  # argparse
        "could not select device driver … with capabilities: [[gpu]]",  # Docker
    ]
    for package in ("peers", "swarm"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def is_said(message: str) -> bool:
    """Whether some text of the code has the message's fixed parts, in their order."""
    parts = [re.escape(part) for part in message.split("…") if part.strip()]
    wanted = re.compile(".*".join(parts), re.DOTALL)
    fixed = [part for part in message.split("…") if part.strip()]
    return any(
        all(part in template for part in fixed) and wanted.search(template) for template in templates()
    )


def symptoms() -> list[str]:
    """What troubleshooting.md says that programs say."""
    text = re.sub(FENCE, "", (DOCS / "troubleshooting.md").read_text())
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    found = [re.match(r"`([^`]+)` — ", part) for part in paragraphs]
    more = re.findall(r"`(…'s weights[^`]*|peer … reports[^`]*|a bug in swarm[^`]*)`", " ".join(paragraphs))
    return [match[1] for match in found if match] + more


@pytest.mark.parametrize("message", symptoms())
def test_a_symptom_is_what_the_code_says(message: str) -> None:
    assert len(message.replace("…", "").strip()) >= 12
    assert is_said(message.replace(": --run, --join", ": …"))


def test_a_symptom_that_nobody_says_would_be_noticed() -> None:
    assert len(symptoms()) >= 24
    assert not is_said("port … is already taken by …")
    assert not is_said("is void … a reduce of step")


# --- links ---

MARKDOWN = tuple(
    str(path.relative_to(ROOT))
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
)


def links(page: str) -> list[str]:
    """Where a page's links and pictures lead, but for other hosts."""
    text = re.sub(FENCE, "", (ROOT / page).read_text())
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


@pytest.mark.parametrize("page", MARKDOWN)
def test_links_lead_somewhere(page: str) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, target


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, new = set(), ["README.md"]
    while new:
        page = new.pop()
        if page in reached:
            continue
        reached.add(page)
        for target in links(page):
            path = os.path.normpath(Path(page).parent / target.partition("#")[0])
            if path.endswith(".md"):
                new.append(path)
    assert reached >= set(MARKDOWN)


# --- the manifest ---


def test_every_preset_is_listed_with_its_sizes() -> None:
    told: dict[str, dict[str, str]] = {}
    for line in (DOCS / "manifest.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "preset":
            header = cells[1:]
        elif cells[0].strip("`") in PRESETS:
            told[cells[0].strip("`")] = dict(zip(header, cells[1:], strict=True))
    assert told.keys() == PRESETS.keys()
    unsaid = {"norm": "rmsnorm", "positions": "rotary", "mlp": "swiglu"}
    for name, row in told.items():
        sizes = {"head": "free", "rotary_base": 10_000, "rotary_scaling": ""} | PRESETS[name]
        assert row == {key: str(sizes[key]).removesuffix(".0") for key in row}
        assert {key: size for key, size in PRESETS[name].items() if key not in row}.items() <= unsaid.items()


def test_the_recipes_are_runs_of_the_sizes_that_the_page_says(tmp_path: Path) -> None:
    names = ("shakespeare", "tales", "tales-small")
    assert {path.name for path in (DOCS / "recipes").iterdir()} == {f"{name}.toml" for name in names}
    plays, told, small = (load_run(DOCS / "recipes" / f"{name}.toml") for name in names)
    assert (plays.steps, plays.batch.microbatch_size * plays.M, plays.data.sequence_length) == (2000, 12, 64)
    assert parameter_count(told.built_in) / 1e6 == pytest.approx(10.0, rel=0.02)
    assert parameter_count(small.built_in) / 1e6 == pytest.approx(3.1, rel=0.02)
    write_tales([str(tmp_path), "--tales", "40"])
    train, held_out = ((tmp_path / name).read_bytes() for name in ("train.txt", "held-out.txt"))
    assert train == tales.text(40) and held_out and held_out not in train


def test_the_written_out_example_is_the_example() -> None:
    (text,) = blocks("docs/manifest.md", "toml")
    assert parse_run(text) == example_run()


# --- pages that are made ---


def test_the_benchmarks_pages_are_made_of_their_data() -> None:
    for path, text in tables.pages().items():
        assert path.read_text() == text, f"{path.name} is out of date: run scripts/bench/tables.py"


def test_the_picture_is_drawn_from_its_data() -> None:
    found = json.loads(loss_curve.DATA.read_text())
    assert loss_curve.PICTURE.read_text() == loss_curve.draw(found)
    assert found["swarm"] == found["one_process"]
    assert len(found["kills"]) == 3
    assert (found["missing"], found["counted_twice"]) == (0, 0)


# --- the architecture ---

ARCHITECTURE = (DOCS / "architecture.md").read_text()
OUR_FILE = re.compile(r"(?:swarm|peers)/[\w/]*?\w+\.py")


def test_the_tree_and_the_reference_are_those_of_the_code() -> None:
    for path, text in tree.pages().items():
        assert path.read_text() == text, f"{path.name} is out of date: run python scripts/tree.py"


def test_the_reference_has_every_command_argument_key_code_and_variable() -> None:
    page = (DOCS / "reference.md").read_text()
    parser = build_parser()
    (each,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    hidden = {"--help", "--traceback", "--die-with-parent"}
    for name, command in each.choices.items():
        part = page.partition(f"\n### swarm {name}\n")[2].partition("\n### swarm ")[0]
        assert command.description in part
        for heading in re.findall(r"\]\(#([\w-]+)\)", part):
            (shared,) = (one for one in tree.reference.SHARED if one.lower().replace(" ", "-") == heading)
            part += page.partition(f"\n### {shared}\n")[2].partition("\n### ")[0]
        flags = {action.option_strings[-1] for action in command._actions if action.option_strings}
        assert not [flag for flag in flags - hidden if f"\n| `{flag}" not in part], name
    keys = {line.partition(" = ")[0] for line in example_run().to_toml().splitlines() if " = " in line}
    keys |= {key.name for spec in (Run, CustomModelSpec, DataSpec) for key in fields(spec) if key.metadata}
    assert len(keys) > 40
    tables = [key.name for key in fields(Run) if key.init and not key.metadata]
    assert "islands" in tables and not [name for name in tables if f"\n### [{name}]\n" not in page]
    assert not [key for key in keys if f"\n| `{key}` |" not in page]
    assert all(f"\n| {code.value} | " in page for code in Exit)
    assert all(f"\n| `{variable}` | " in page for variable in VARIABLES)


def walks() -> dict[str, str]:
    """Heading -> text of each walk."""
    parts = re.split(r"^### (.*)$", ARCHITECTURE.partition("\n## The tree\n")[0], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("heading", walks())
def test_a_walk_has_at_most_six_files_and_all_are_there(heading: str) -> None:
    steps = re.findall(r"^\d\. (.*(?:\n   .*)*)", walks()[heading], re.MULTILINE)
    files = [name for step in steps for name in OUR_FILE.findall(step)]
    assert 3 <= len(set(files)) <= 6
    for name in OUR_FILE.findall(walks()[heading]):
        assert (ROOT / name).is_file(), name


def test_there_are_five_questions_and_three_walks() -> None:
    assert len(walks()) == 8


def test_the_decisions_of_the_architecture_are_as_it_shows_them() -> None:
    failed, tried = doctest.testfile(str(ROOT / "docs" / "architecture.md"), module_relative=False)
    assert tried > 8 and not failed


# --- the papers of the house ---


def test_the_changelog_and_the_citation_have_the_version_of_the_package() -> None:
    versions = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == cited["version"] == swarm.__version__
    assert versions[0] in (project["version"], "Unreleased")
    assert project["version"] in versions
    assert cited["license"] == project["license"]


def test_the_papers_whose_ideas_these_are_are_cited() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert [(paper["authors"][0]["family-names"], paper["url"]) for paper in cited["references"]] == [
        ("Ryabinin", "https://arxiv.org/abs/2301.11913"),
        ("Yuan", "https://arxiv.org/abs/2206.01288"),
        ("Tang", "https://arxiv.org/abs/2410.12707"),
    ]


# --- the words ---

OLD_WORDS = re.compile(
    r"\b(councils?|conductors?|eras?|briefs?|mates?|handovers?|farewells?|whoever|somebody|way back)\b", re.I
)
"""Private words that gave way to those of the glossary, and vague actors."""


@pytest.mark.parametrize("page", MARKDOWN)
def test_a_page_has_plain_words_only(page: str) -> None:
    text = re.sub(r"`[^`]*`", "", re.sub(FENCE, "", (ROOT / page).read_text()))
    assert not OLD_WORDS.findall(text)


def test_each_threat_is_shown_by_tests_that_there_are() -> None:
    """A name may end in "…"."""
    page = (ROOT / "docs" / "threats.md").read_text()
    sources = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    code = "\n".join(sources.values())
    named = re.findall(r"`(test_\w+)(…?)`", page)
    assert len(named) > 50
    assert not [name for name, more in named if f"def {name}{'' if more else '('}" not in code]
    files = set(re.findall(r"`(tests/\S+\.py)`", page))
    assert not {name for name in files if ROOT / name not in sources}
