"""Tokens from far away: fetched by block, verified, kept, and taken from another address if need be."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import pytest

from peers.storage import CACHE_ENV, atomic_file, fetch
from peers.storage.dataset import Dataset, open_dataset
from peers.storage.index import NAME, TREE, Index, Shard, Source
from peers.storage.samples import fetch_eval, open_eval, pinned_eval
from peers.storage.shards import make_index
from swarm.data import check_samples, sample_offsets
from swarm.errors import NotNow, SetupError
from swarm.evaluation import eval_offsets
from swarm.manifest import EvalSpec, Run
from swarm.merkle import BLOCK_BYTES
from tests.example import example_run
from tests.peers.admitted import admitting
from tests.seeds import some
from tests.serving import Handler, Server

RUN = replace(
    example_run(),
    model=replace(example_run().model, vocab_size=60_000),
    data=replace(example_run().data, source="files", sequence_length=500),
)
TOKENS = np.random.default_rng(1).integers(0, 60_000, 3 * BLOCK_BYTES // 2 + 1234, dtype=np.uint16)
"""Three blocks and a bit."""
CUTS = (0, 1000, BLOCK_BYTES // 2, BLOCK_BYTES + 77, len(TOKENS))
"""Shards end inside blocks, and where one ends."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an index and its shards; the third has wider tokens behind a header."""
    folder = tmp_path_factory.mktemp("data")
    shards = []
    for number, (start, end) in enumerate(pairwise(CUTS)):
        name, tokens = f"{number}.tokens", TOKENS[start:end]
        wide = number == 2
        (folder / name).write_bytes(b"head" * wide + tokens.astype("<i4" if wide else "<u2").tobytes())
        shards.append(Shard((name,), len(tokens), "int32" if wide else "", 4 * wide))
    make_index(folder, [Source("all", tuple(shards))], "uint16")
    return folder


def copied(source: Path, folder: Path) -> Path:
    """A new folder with the files of another one."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def server(made: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(copied(made, tmp_path / "served"))
    yield server
    server.close()


def addressed(server: Server, *addresses: str) -> str:
    """An index whose shards have these addresses, in which {} is their name."""
    index = msgspec.json.decode((server.folder / "index.json").read_bytes(), type=Index)
    (source,) = index.sources
    shards = tuple(
        msgspec.structs.replace(shard, at=tuple(one.format(shard.at[0]) for one in addresses))
        for shard in source.shards
    )
    folder = server.folder / "other"
    folder.mkdir()
    (folder / TREE).write_bytes((server.folder / TREE).read_bytes())
    (folder / NAME).write_bytes(
        msgspec.json.encode(msgspec.structs.replace(index, sources=(Source("all", shards),)))
    )
    return str(folder / NAME)


def opened(address: str, tmp_path: Path, run: Run = RUN, **more: Any) -> tuple[Run, Dataset]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_ENV, str(tmp_path / "cache"))
        data = open_dataset(run, [address], **more)
    return data.pinned(run), data


def assert_right(data: Dataset, offsets: list[int]) -> None:
    window = RUN.data.sequence_length + 1
    assert np.array_equal(data.batch(offsets), np.stack([TOKENS[at : at + window] for at in offsets]))


EVERYWHERE = [0, 900, CUTS[2] - 100, CUTS[3] - 3, 2 * BLOCK_BYTES // 2 - 1, len(TOKENS) - 501]
"""Across ends of shards, across ends of blocks, and both ends."""


@pytest.mark.parametrize("as_what", some(["index", "folder", "address"], quick=["index", "folder"]))
def test_an_index_is_read_where_it_is(server: Server, tmp_path: Path, as_what: str) -> None:
    folder = str(server.folder)
    address = {"index": f"{folder}/index.json", "folder": folder, "address": f"{server.url}/index.json"}
    run, data = opened(address[as_what], tmp_path)
    assert (run.data.tokens, run.data.sha256) == (len(TOKENS), data.root)
    assert_right(data, EVERYWHERE)
    kept = sum(path.stat().st_size for path in (tmp_path / "cache" / "blocks").rglob("*") if path.is_file())
    assert (kept > data.tokens) == (as_what == "address"), "what is here already is not copied"
    assert bool(server.asked) == (as_what == "address")


def test_what_was_verified_is_not_fetched_again_at_the_next_start(server: Server, tmp_path: Path) -> None:
    run, data = opened(f"{server.url}/index.json", tmp_path)
    assert not data.has([0])
    data.bring([0])
    assert data.has([0]) and not data.has([len(TOKENS) - 501])
    assert_right(data, EVERYWHERE)
    there = str(server.folder / "index.json")
    server.asked.clear()
    for shard in server.folder.glob("*.tokens"):
        shard.unlink()
    assert_right(opened(there, tmp_path, run)[1], EVERYWHERE)
    assert not server.asked


def test_a_server_that_has_no_ranges_will_do(server: Server, tmp_path: Path) -> None:
    copied(server.folder, server.folder / "whole")
    assert_right(opened(f"{server.url}/whole/index.json", tmp_path)[1], EVERYWHERE)


def test_a_corrupt_shard_and_one_that_is_gone_are_named_and_another_address_is_taken(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = server.folder / "bad"
    bad.mkdir()
    for path in server.folder.glob("*.tokens"):
        (bad / path.name).write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    index = addressed(server, f"{server.url}/gone/{{}}", f"{server.url}/bad/{{}}", f"{server.url}/{{}}")
    _, data = opened(index, tmp_path)
    assert_right(data, EVERYWHERE)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(
        re.search(r"/gone/1\.tokens: it cannot be had: .*404.*another address is taken", s) for s in said
    ), said
    assert any(re.search(r"/bad/1\.tokens: it is not what the index says: it is corrupt", s) for s in said)
    assert len(said) == len(set(said)), "each is said once"
    assert not any(f"{server.url}/{n}.tokens: it" in s for n in (1, 3) for s in said if "gone" in s)


def test_a_good_shard_that_was_tried_beside_a_corrupt_one_is_not_called_corrupt(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half = copied(server.folder, server.folder / "half")
    (half / "0.tokens").write_bytes(bytes(2 * CUTS[1]))
    _, data = opened(addressed(server, f"{server.url}/half/{{}}", f"{server.url}/{{}}"), tmp_path)
    assert_right(data, EVERYWHERE)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith(f"the data at {server.url}/half/0.tokens: it is not what the index says")


def test_of_several_shards_of_a_block_that_is_right_nowhere_none_is_called_corrupt(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (server.folder / "0.tokens").write_bytes(bytes(2 * CUTS[1]))
    _, data = opened(addressed(server, f"{server.url}/{{}}"), tmp_path)
    with pytest.raises(
        SetupError, match=r"/0\.tokens is not what .*, or one beside it is not; .*/1\.tokens is"
    ):
        data.batch([0])
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_a_shard_that_is_right_nowhere_is_an_error_that_names_all_addresses(
    server: Server, tmp_path: Path
) -> None:
    (server.folder / "3.tokens").write_bytes(bytes(2 * (CUTS[4] - CUTS[3])))
    index = addressed(server, f"{server.url}/gone/{{}}", f"{server.url}/{{}}")
    _, data = opened(index, tmp_path)
    assert_right(data, [0])
    last = [len(TOKENS) - 501]
    with pytest.raises(
        SetupError, match=r"nowhere: \S+gone/3\.tokens cannot be had.*; \S+/3\.tokens is not what the index"
    ):
        data.bring(last)
    (server.folder / "3.tokens").unlink()
    with pytest.raises(SetupError, match=r"/3\.tokens cannot be had: .*404"):
        data.batch(last)


def test_a_server_that_does_not_answer_is_asked_again_later(server: Server, tmp_path: Path) -> None:
    _, data = opened(addressed(server, f"{server.url}/{{}}"), tmp_path)
    data.bring([0])
    server.close()
    for use in (data.bring, data.batch):
        with pytest.raises(NotNow, match=r"/3\.tokens cannot be had: .*refused") as away:
            use([len(TOKENS) - 501])
        assert away.value.retry_after_s > 0
    assert_right(data, [0])


def test_the_tokens_of_an_evaluation_are_here_before_it_begins(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    run = replace(RUN, eval=EvalSpec(every=2, samples=16))
    address = f"{server.url}/index.json"
    held_out = open_eval(run, [address], None)
    assert isinstance(held_out, Dataset)
    run = pinned_eval(run, held_out)
    offsets = [offset for e in range(2) for offset in eval_offsets(run, e)]
    assert not held_out.has(offsets)
    fetch_eval(run, held_out)
    assert held_out.has(offsets)


def test_what_fsspec_reads_is_read(server: Server, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path in server.folder.glob("*.tokens"):
        memory.pipe(f"/tokens/{path.name}", path.read_bytes())
    _, data = opened(addressed(server, "memory://gone/{}", "memory://tokens/{}"), tmp_path)
    assert_right(data, EVERYWHERE)
    memory.rm("/tokens", recursive=True)
    _, other = opened(str(server.folder / "other"), tmp_path / "empty")
    with pytest.raises(SetupError, match=r"nowhere: memory://gone/0\.tokens cannot be had: "):
        other.batch([0])


def test_the_files_of_a_hub_are_read(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    for kind, name, revision in (("datasets/", "me/tales", "main"), ("", "me/tales@v2", "v2")):
        copied(server.folder, server.folder / kind / "me" / "tales" / "resolve" / revision / "a")
        assert_right(opened(f"hf://{kind}{name}/a/index.json", tmp_path / revision)[1], EVERYWHERE)
    with pytest.raises(SetupError, match=r"hf://nobody/index\.json is no hf://\[datasets/\]OWNER/NAME"):
        opened("hf://nobody/index.json", tmp_path)


def test_a_shard_that_ends_too_early_cannot_be_had(server: Server, tmp_path: Path) -> None:
    (server.folder / "0.tokens").write_bytes(bytes(100))
    with pytest.raises(SetupError, match=r"0\.tokens cannot be had: it ends before its token 1000"):
        opened(f"{server.url}/index.json", tmp_path)[1].batch([0])


def test_a_block_that_is_damaged_on_this_disk_is_fetched_again(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"{server.url}/index.json"
    assert_right(opened(address, tmp_path)[1], EVERYWHERE)
    for at in (40, -600):  # among the nodes, among the tokens
        for path in (tmp_path / "cache" / "blocks").rglob("??/*"):
            raw = bytearray(path.read_bytes())
            raw[at] ^= 1
            path.write_bytes(raw)
        caplog.clear()
        run, data = opened(address, tmp_path, admitting(RUN))
        assert_right(data, [0, len(TOKENS) - 501])
        assert "is damaged" in caplog.text or at == 40
        proven = data.prove(run, sample_offsets(run, 0, 0))
        rows = np.ascontiguousarray(data.batch(sample_offsets(run, 0, 0)))
        check_samples(run, 0, 0, memoryview(rows).cast("B"), memoryview(proven))


def test_the_cache_stays_within_its_bound_and_keeps_what_was_used_last(
    server: Server, tmp_path: Path
) -> None:
    most = 2 * BLOCK_BYTES + BLOCK_BYTES // 2
    _, data = opened(f"{server.url}/index.json", tmp_path, cache_bytes=most)
    blocks = [0, BLOCK_BYTES // 2, BLOCK_BYTES]
    for age, offset in enumerate(blocks):
        data.bring([offset])
        for path in (tmp_path / "cache" / "blocks").rglob("??/*"):
            os.utime(path, (age + path.stat().st_mtime % 1, age))
        assert data.has([offset])
    kept = [path.stat().st_size for path in (tmp_path / "cache" / "blocks").rglob("??/*")]
    assert sum(kept) <= most and data.has([blocks[2]]) and not data.has([blocks[0]])
    assert_right(data, EVERYWHERE)


STRANGE = "is this 100 %? ü #1.tokens"
"""`swarm tokenize` names a shard after its text."""


@pytest.mark.parametrize("at", ["the server", "the hub"])
def test_files_may_have_names_that_an_address_writes_otherwise(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    text = (server.folder / NAME).read_text()
    (server.folder / NAME).write_text(text.replace("0.tokens", STRANGE))
    (server.folder / "0.tokens").rename(server.folder / STRANGE)
    address = f"{server.url}/index.json"
    if at == "the hub":
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        address = "hf://datasets/some/data/index.json"
        place = server.folder / "datasets" / "some" / "data" / "resolve" / "main"
        copied(server.folder, place)
    assert_right(opened(address, tmp_path)[1], EVERYWHERE)


def test_a_full_cache_disk_is_said_and_the_tokens_are_used_all_the_same(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, data = opened(f"{server.url}/index.json", tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(atomic_file, "write_all", full)
        assert_right(data, [0, 900])
        assert_right(data, [len(TOKENS) - 501])
    data.bring(EVERYWHERE)
    assert data.has(EVERYWHERE), "there is room again, and all of it may be kept"
    said = [r.getMessage() for r in caplog.records if "the disk is full" in r.getMessage()]
    assert len(said) == 1 and "cannot keep data in" in said[0] and "set SWARM_CACHE" in said[0]


def test_an_index_of_other_tokens_or_none_at_all_is_refused(server: Server, tmp_path: Path) -> None:
    address = str(server.folder / "index.json")
    run, _ = opened(address, tmp_path)
    other = replace(run, data=replace(run.data, sha256="ab" * 32))
    with pytest.raises(SetupError, match=r"with the root .* pins .*abab.* or the index of the run's owner"):
        opened(address, tmp_path, other)
    small = replace(RUN, model=replace(RUN.model, vocab_size=256))
    with pytest.raises(
        SetupError, match=r"index is of uint16, but model\.vocab_size = 256 .* --vocab-size 256"
    ):
        opened(address, tmp_path, small)
    with pytest.raises(SetupError, match=r"cannot read the index \S+/gone/index\.json: .*404"):
        opened(f"{server.url}/gone/index.json", tmp_path)
    with pytest.raises(SetupError, match=r"index\.json is an index: give it alone"):
        open_dataset(RUN, [address, address])
    raw = msgspec.json.decode((server.folder / "index.json").read_bytes())
    for wrong, words in (
        ({"root": "ab" * 32}, r"index\.tree is damaged: remove it, and make the index again"),
        ({"root": "../../secret"}, r"is not an index of data: .*\$\.root"),
        ({"root": "ab"}, r"is not an index of data: .*\$\.root"),
        (
            {"root": "ab" * 32 + " " * 5000},
            r"is not an index of data: .*\$\.root",
        ),  # too long for a file's name
        ({"tree": "0.tokens"}, r"0\.tokens is damaged: "),
        ({"tree": "gone"}, r"cannot read \S+/gone: No such file"),
        ({"swarm_index": 1}, "is not an index of data: .*swarm_index"),
        ({"dtype": "float16"}, "is not an index of data: "),
        (
            {"sources": [{"name": "x", "shards": [{"at": [], "tokens": 5}]}]},
            "is not an index .* a shard of 'x'",
        ),
        (
            {"sources": [{"name": "x", "shards": [{"at": ["0.tokens"], "tokens": 5, "skip": 1 << 63}]}]},
            "is not an index .* a shard of 'x'",  # no file is so long: a trainer ended where it read there
        ),
        (
            {"sources": [{"name": "x", "shards": [{"at": ["a\0b"], "tokens": 5}]}]},
            r"is not an index of data: 'a\\x00b' names no file",
        ),
        # 10 million addresses took 141 s and 1.7 GB to read; of each that is dead 30 s are waited for.
        (
            {"sources": [{"name": "x", "shards": [{"at": ["a"] * 16, "tokens": 5}] * (1 << 15) * 2}]},
            "is not an index of data: its shards have 1048576 addresses, and at most 524288 may be",
        ),
        ({"sources": [{"name": "x", "shards": [{"at": ["a"] * 17, "tokens": 5}]}]}, r"shards\[0\]\.at"),
        ({"sources": [{"name": "x", "shards": [{"at": ["a" * 2049], "tokens": 5}]}]}, r"shards\[0\]\.at"),
        (
            {"sources": [{"name": "x" * 10**6, "shards": [{"at": [], "tokens": 5}]}]},
            r"shard of 'x{180,190}; swarm",
        ),
        ({"tree": "a\0b"}, r"is not an index of data: 'a\\x00b' names no file"),
    ):
        (server.folder / "index.json").write_bytes(msgspec.json.encode({**raw, **wrong}))
        with pytest.raises(SetupError, match=words):
            opened(address, tmp_path)
    deep = b'{"swarm_index": 2, "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (server.folder / "index.json").write_bytes(deep)
    with pytest.raises(SetupError, match=r"index\.json is not an index of data: .*recursion"):
        opened(address, tmp_path)


@pytest.mark.parametrize("of_block", [0, 2])
def test_a_tree_that_is_damaged_is_fetched_again(
    server: Server, tmp_path: Path, of_block: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that is damaged while it is in use; nothing is hashed before."""
    address = f"{server.url}/index.json"
    _, data = opened(address, tmp_path)
    (kept,) = (tmp_path / "cache" / "trees").iterdir()
    right = kept.read_bytes()
    assert right == (server.folder / TREE).read_bytes()
    kept.write_bytes(right[: 32 * of_block] + b"?" * 32 + right[32 * of_block + 32 :])
    assert_right(data if of_block else opened(address, tmp_path)[1], [of_block * BLOCK_BYTES // 2])
    assert kept.read_bytes() == right and "is damaged: fetching it again" in caplog.text
    kept.write_bytes(bytes(len(right)))
    (server.folder / TREE).write_bytes(bytes(len(right)))
    with pytest.raises(SetupError, match=r"http\S+/index\.tree is damaged: remove it, and make the index"):
        opened(address, tmp_path)
    kept.unlink()
    (server.folder / TREE).write_bytes(right[:-1])
    with pytest.raises(SetupError, match=r"index\.tree is damaged"):
        opened(address, tmp_path)
    assert not kept.exists()


@pytest.mark.parametrize(("tokens", "words"), [
    (1 << 49, r"is not an index of data: it has 56294995\d{7} tokens, and a run at most 281474976710656;"),
    (1 << 46, r"index\.tree has 214\d{7} bytes, over an eighth of .* 8388608 bytes: .*--cache-size"),
])  # fmt: skip
def test_nothing_is_fetched_of_a_tree_that_is_larger_than_the_cache_may_be(
    server: Server, tmp_path: Path, tokens: int, words: str
) -> None:
    """Nothing pins the data of a run that is not published: what an index says, its server can send."""
    index = server.folder / "index.json"
    index.write_bytes(re.sub(rb'"tokens":\d+', b'"tokens":%d' % tokens, index.read_bytes(), count=1))
    with pytest.raises(SetupError, match=words):
        opened(f"{server.url}/index.json", tmp_path, cache_bytes=8 << 20)
    assert server.asked == ["/index.json"]


def test_a_tree_that_cannot_be_kept_is_an_error_that_says_where(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_file, "write_all", full)
    with pytest.raises(
        SetupError, match=r"cannot keep the index in \S+/trees: the disk is full .* SWARM_CACHE"
    ):
        opened(f"{server.url}/index.json", tmp_path)
    (server.folder / TREE).unlink()
    with pytest.raises(SetupError, match=r"cannot read http\S+/index\.tree: .*404"):
        opened(f"{server.url}/index.json", tmp_path)


def test_an_index_from_afar_names_no_file_of_this_machine(server: Server, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(TOKENS.tobytes())
    (server.folder / "index.json").write_bytes(Path(addressed(server, str(secret))).read_bytes())
    with pytest.raises(SetupError, match=r"cannot be had: .*404"):
        opened(f"{server.url}/index.json", tmp_path)[1].batch([0])
    (server.folder / "other").rename(server.folder / "before")
    (server.folder / "index.json").write_bytes(
        (server.folder / "before" / "index.json").read_bytes().replace(b'"/', b'"file:///')
    )
    with pytest.raises(SetupError, match=r"is not an index of data: file:///"):
        opened(f"{server.url}/index.json", tmp_path)
    # fsspec would read these here as well, by itself or by programs and keys of this machine's user.
    for other in ("simplecache::file:///etc/passwd", "FILE:///etc/passwd", "ssh://me@host/x", "memory://x"):
        with pytest.raises(ValueError, match=re.escape(other)):
            fetch.beside(f"{server.url}/index.json", other)
    assert fetch.beside("https://a/b/index.json", "s3://c/d") == "s3://c/d"


def test_nothing_is_taken_of_what_comes_with_a_redirect(tmp_path: Path) -> None:
    """The memory of a trainer was full of it."""
    sent_mb = [0]

    class Talkative(Handler):
        def do_GET(self) -> None:  # noqa: N802
            super().do_GET()
            with contextlib.suppress(OSError):
                for _ in range(256 * (self.path in self.server.moved)):  # type: ignore
                    self.wfile.write(bytes(1 << 20))
                    sent_mb[0] += 1

    (tmp_path / "there").write_bytes(b"1234")
    talkative = Server(tmp_path, Talkative)
    talkative.moved["/here"] = f"{talkative.url}/there"
    try:
        assert fetch.read(f"{talkative.url}/here", 0, 4) == b"1234"
    finally:
        talkative.close()
    assert sent_mb[0] < 64, "what buffers take"


def test_nothing_is_taken_of_a_server_after_its_time() -> None:
    """Each of its answers ends: `tests/net/test_data_server.py`."""
    answer = fetch._InTime(io.BufferedReader(io.BytesIO(b"12")))  # type: ignore
    assert answer.read(1) == b"1"
    answer.until = 0.0
    with pytest.raises(ConnectionError, match="its answer has no end"):
        answer.read(1)


@pytest.mark.parametrize("by", ["a redirect", "the index"])
def test_a_server_in_the_internet_leads_nobody_into_the_own_network(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Else it has a trainer ask the devices beside it for any pages. A proxy is the internet here."""
    internet = Server(server.folder)
    internet.moved |= {"/moved.json": "http://other.example/index.json", "/ftp": "ftp://127.0.0.1/x"}
    if by == "a redirect":
        internet.moved |= {f"/{n}.tokens": f"{server.url}/{n}.tokens" for n in range(len(CUTS) - 1)}
    else:
        named = Path(addressed(server, f"{server.url}/{{}}")).read_bytes()
        (server.folder / "index.json").write_bytes(named)
    monkeypatch.setenv("http_proxy", internet.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    try:
        _, data = opened("http://data.example/moved.json", tmp_path)
        with pytest.raises(
            SetupError,
            match=r"0\.tokens cannot be had: it leads to \S+/0\.tokens, which is 127\.0\.0\.1 in a private "
            r"network, where only an index there, or on this machine, may lead",
        ):
            data.batch([0])
        with pytest.raises(OSError, match=r"it leads to ftp://127\.0\.0\.1/x, which is not HTTP"):
            fetch.read("http://data.example/ftp")
    finally:
        internet.close()
    assert not server.asked


def test_tokens_that_the_vocabulary_lacks_are_an_error(server: Server, tmp_path: Path) -> None:
    few = replace(RUN, model=replace(RUN.model, vocab_size=500))
    with pytest.raises(SetupError, match=r"vocab_size = 500 .* tokens up to \d+: it must be at least"):
        opened(str(server.folder), tmp_path, few)[1].batch([0])
