"""`swarm tokenize hf:…`: data sets by their names, of a folder and of a hub on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peers import cli
from tests.byte_pairs import save_byte_pairs
from tests.peers.storage.test_tokenize import TEXTS, expected, made, tokens_of
from tests.serving import Handler, Server

COMMIT = "5" * 40
CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
- config_name: poems
  data_files: poems/*
---
"""


class Hub(Handler):
    """As much of Hugging Face's hub as a data set in a folder needs; each revision is the same commit."""

    def do_GET(self) -> None:  # noqa: N802
        self.server.asked.append(self.path)  # type: ignore
        folder, path = Path(self.directory), self.path.partition("?")[0]
        if "/resolve/" in path:
            self._file(folder / path.split("/resolve/")[1].partition("/")[2])
        elif "/tree/" in path:
            found = sorted((folder / path.split("/tree/")[1].partition("/")[2]).iterdir())
            self._answer(json.dumps([self._entry(one) for one in found]).encode())
        elif path.startswith("/api/datasets/me/tales/revision/"):
            self._answer(json.dumps({"id": "me/tales", "sha": COMMIT, "siblings": []}).encode())
        else:
            self._answer(b"", 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815

    def _entry(self, path: Path) -> dict[str, Any]:
        kind, name = "file" if path.is_file() else "directory", str(path.relative_to(self.directory))
        return {"type": kind, "path": name, "size": path.stat().st_size, "oid": COMMIT}

    def _file(self, path: Path) -> None:
        told = {"X-Repo-Commit": COMMIT, "ETag": f'"{path.name}"'}
        if not path.is_file():
            self._answer(b"", 404, told | {"X-Error-Code": "EntryNotFound"})
        elif found := self.headers.get("Range"):
            data = path.read_bytes()
            first, last = map(int, found.removeprefix("bytes=").split("-"))
            place = {"Content-Range": f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"}
            self._answer(data[first : last + 1], 206, told | place)
        else:
            self._answer(path.read_bytes(), 200, told)

    def _answer(self, data: bytes, code: int = 200, told: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {**(told or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture
def tales(tmp_path: Path) -> Path:
    """A data set as its library makes it out: three files, another split, another configuration."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "tales"
    for name, texts in {
        "data/train-00000-of-00003": TEXTS[:2],
        "data/train-00001-of-00003": [*TEXTS[2:], None],
        "data/train-00002-of-00003": ["the end"],
        "data/test-00000-of-00001": ["the cat"],
        "poems/all": ["a hat"],
    }.items():
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        column = "line" if name == "poems/all" else "text"
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), column: texts}), path)
    (folder / "README.md").write_text(CARD)
    return folder


def test_each_row_of_a_data_set_is_a_document(
    tmp_path: Path, tales: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = save_byte_pairs(tmp_path / "words.json", "<|endoftext|>")
    for number, (more, texts) in enumerate(
        [
            ([f"hf:{tales}"], [*TEXTS, "the end"]),
            ([f"hf:{tales}::test"], ["the cat"]),
            ([f"hf:{tales}:default:test"], ["the cat"]),
            ([f"hf:{tales}:poems", "--field", "line"], ["a hat"]),
        ]
    ):
        out = tmp_path / f"out{number}"
        made(capsys, out, *more, "--tokenizer", words, "--jobs", 2 if number == 0 else 1)
        assert tokens_of(out) == expected(words, texts)
    # Beside a file, with weights.
    (tmp_path / "a.txt").write_text("the mat")
    out = tmp_path / "mixed"
    made(capsys, out, f"hf:{tales}", tmp_path / "a.txt", "--tokenizer", words, "--weights", 2, 1, "--jobs", 1)
    sources = json.loads((out / "index.json").read_bytes())["sources"]
    assert [(one["name"], len(one["shards"]), one.get("weight", 1)) for one in sources] == [
        (f"hf:{tales}", 3, 2), ("a", 1, 1),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.process
def test_a_data_set_of_a_hub_is_read_at_one_commit_and_goes_on_where_it_was(
    tmp_path: Path, tales: Path
) -> None:
    """Its libraries read where the hub is when they are imported: in processes of their own."""
    hub = Server(tales, Hub)
    words = [sys.executable, "-m", "peers", "tokenize", "--out", str(tmp_path / "out"), "--jobs", "2"]
    here = {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip

    def run(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*words, name], env=os.environ | here, capture_output=True, text=True, timeout=100
        )

    try:
        first = run("hf:me/tales@v2")
        assert first.returncode == 0, first.stderr
        assert bytes(tokens_of(tmp_path / "out")) == "".join([*TEXTS, "the end"]).encode()
        assert any(path.startswith("/datasets/me/tales/resolve/v2/") for path in hub.asked)
        fetched = [path for path in hub.asked if path.endswith(".parquet")]
        assert {path.split("/")[5] for path in fetched} == {COMMIT}
        hub.asked.clear()
        assert run("hf:me/tales@v2").stdout == first.stdout
        assert not [path for path in hub.asked if path.endswith(("1-of-00003.parquet", "2-of-00003.parquet"))]
        wrong = run("hf:me/nothing")
        assert wrong.returncode == cli.Exit.SETUP and "hf:me/nothing cannot be had: " in wrong.stderr
    finally:
        hub.close()


def test_what_was_made_of_a_data_set_is_not_made_again(
    tmp_path: Path, tales: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    made(capsys, out, f"hf:{tales}", "--jobs", 1)
    first = {path: path.stat().st_mtime_ns for path in out.glob("*.tokens")}
    gone = min(first)
    gone.unlink()
    made(capsys, out, f"hf:{tales}", "--jobs", 1)
    again = {path: path.stat().st_mtime_ns for path in out.glob("*.tokens")}
    assert len(first) == 3 and first.keys() == again.keys()
    assert {path for path in first if first[path] != again[path]} == {gone}
    path = min(tales.glob("data/train-*"))  # another version of the data set
    path.write_bytes(max(tales.glob("data/train-*")).read_bytes())
    made(capsys, out, f"hf:{tales}", "--jobs", 1)
    assert len(list(out.glob("*.tokens"))) == 6


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["@"], r"no hf:OWNER/NAME\[@REVISION\]\[:CONFIG\]\[:SPLIT\]"),
        ([":sagas"], r"cannot be had: .*'sagas' not found\. Available: \['default', 'poems'\]"),
        (["::valid"], r"cannot be had: Bad split: valid\. Available splits: \['train', 'test'\]"),
        ([":poems"], "part 0 of .* has no text in 'text', but id, line: give the right one with --field"),
        (["", "--field", "id"], "part 0 of .* has no text in 'id', but int64 in it: give the right one"),
    ],
)
def test_what_a_data_set_lacks_is_named(
    tmp_path: Path, tales: Path, more: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = made(capsys, tmp_path / "out", f"hf:{tales}{more[0]}", *more[1:], "--jobs", 1, ends=cli.Exit.SETUP)
    assert re.search(error, said), said


def test_a_data_set_that_was_damaged_is_never_taken_for_a_shorter_one(
    tmp_path: Path, tales: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = max(tales.glob("data/train-*"))
    path.write_bytes(path.read_bytes()[:-1])
    said = made(capsys, tmp_path / "out", f"hf:{tales}", "--jobs", 1, ends=cli.Exit.SETUP)
    assert re.search("part 2 of hf:.* cannot be read to its end: ", said)
    assert len(list((tmp_path / "out").glob("*.tokens"))) == 2


def test_without_the_library_the_error_says_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    said = made(capsys, tmp_path / "out", "hf:me/tales", ends=cli.Exit.SETUP)
    assert "hf:me/tales needs datasets: pip install 'swarm-train[data]'" in said
