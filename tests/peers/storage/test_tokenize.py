"""`swarm tokenize`: texts, and tokens of other programs, become one index."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import resource
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers

from peers import cli
from peers.start_line import program
from peers.storage import shards
from peers.storage.dataset import Dataset, open_dataset
from peers.storage.index import Index
from peers.storage.shards import in_parallel
from peers.storage.tokenizer import PART_CHARS, Tokenizer, load_tokenizer
from peers.tokenize import documents
from swarm.errors import SetupError
from swarm.manifest import Run
from tests.byte_pairs import save_byte_pairs
from tests.example import example_run

MEGATRON = b"MMIDIDX\0\0" + struct.pack("<QB", 1, 8)
"""How an index of tokens of two bytes begins."""
TEXTS = ["the cat sat", "on the mat\nthe hat", "", "Où est-ce? the cat"]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer with an end of documents."""
    return save_byte_pairs(tmp_path / "words.json", "<|endoftext|>")


def rows(path: Path, texts: list[str] = TEXTS, field: str = "text") -> Path:
    content = "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts))
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


def opened(out: Path, sequence_length: int = 1) -> tuple[Run, Dataset]:
    """A run on the tokens of an index, pinned, and these."""
    index = msgspec.json.decode((out / "index.json").read_bytes(), type=Index)
    vocab_size = {"uint8": 256, "uint16": 60_000, "uint32": 70_000}[index.dtype]
    run = example_run()
    run = replace(
        run,
        model=replace(run.model, vocab_size=vocab_size),
        data=replace(
            run.data,
            source="files",
            tokenizer="file" if index.tokenizer else "bytes",
            sequence_length=sequence_length,
        ),
    )
    data = open_dataset(run, [out])
    return data.pinned(run), data


def tokens_of(out: Path) -> list[int]:
    """All tokens of an index, read and verified as a trainer does."""
    _, data = opened(out)
    return [int(data.batch([at])[0, 0]) for at in range(data.tokens - 1)] + [
        int(data.batch([data.tokens - 2])[0, 1])
    ]


def tokens_of_all(out: Path) -> list[int]:
    (shard,) = out.glob("*.tokens")
    return list(shard.read_bytes())


def made(capsys: pytest.CaptureFixture[str], out: Path, *words: Any, ends: int = 0) -> str:
    assert cli.main(["tokenize", *map(str, words), "--out", str(out)]) == ends
    said = capsys.readouterr()
    return said.out if ends == 0 else said.err


def expected(words: Path, texts: list[str] = TEXTS) -> list[int]:
    library = tokenizers.Tokenizer.from_file(str(words))
    end = library.token_to_id("<|endoftext|>")
    return [token for text in texts for token in [*library.encode(text).ids, end]]  # type: ignore


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_each_row_is_a_document_with_an_end(
    tmp_path: Path, words: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if name.endswith(".zst"):
        path.write_bytes(packed_by(name, rows(tmp_path / "plain.jsonl").read_bytes()))
    elif name.endswith(".parquet"):
        table = pytest.importorskip("pyarrow").table({"text": TEXTS})
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    elif name.endswith(".arrow"):  # as save_to_disk of the library `datasets` writes it
        arrow = pytest.importorskip("pyarrow")
        table = arrow.table({"id": range(len(TEXTS)), "text": TEXTS})
        with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    else:
        rows(path)
    said = made(capsys, tmp_path / "out", path, "--tokenizer", words)
    run, _ = opened(tmp_path / "out")
    assert run.data.tokenizer_sha256 == hashlib.sha256(words.read_bytes()).hexdigest()
    with pytest.raises(
        SetupError, match=r'of a tokenizer\'s file, .* data\.tokenizer = "bytes": make it "file"'
    ):
        unlike = replace(run, data=replace(run.data, tokenizer="bytes", tokenizer_sha256=""))
        open_dataset(unlike, [tmp_path / "out"])
    assert tokens_of(tmp_path / "out") == expected(words)
    assert 'data.tokenizer = "file"' in said and "tokens of uint16 in 1 shard, root " in said
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == words.read_bytes()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_what_is_no_text_is_not_made_into_tokens_byte_by_byte(tmp_path: Path, name: str) -> None:
    """A scan, or a text in UTF-16, would have trained a model on nonsense, and nothing said so."""
    path, text = tmp_path / name, TEXTS[0].encode("utf-16")
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    with pytest.raises(SetupError, match=f"{name} is not text: it has null bytes. Convert it"):
        list(documents.chunks(path))


@pytest.mark.slow  # it starts processes
def test_a_text_is_one_document_and_bytes_need_no_tokenizer(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, more = tmp_path / "1.txt", tmp_path / "2.txt"
    text.write_text(TEXTS[1])
    more.write_text(TEXTS[0])
    made(capsys, tmp_path / "bytes", text, more)
    line = made(capsys, tmp_path / "two words", text).splitlines()[-1]
    assert line == f"then: {program()} bootstrap --manifest run.toml --data '{tmp_path}/two words'"
    assert bytes(tokens_of(tmp_path / "bytes")) == (TEXTS[1] + TEXTS[0]).encode()
    made(capsys, tmp_path / "ended", text, more, "--eos", "256")
    assert tokens_of(tmp_path / "ended") == [*TEXTS[1].encode(), 256, *TEXTS[0].encode(), 256]
    made(capsys, tmp_path / "words", text, more, "--tokenizer", words)
    assert tokens_of(tmp_path / "words") == expected(words, [TEXTS[1], TEXTS[0]])
    made(capsys, tmp_path / "none", text, "--tokenizer", words, "--eos", "none")
    assert tokens_of(tmp_path / "none") == expected(words, [TEXTS[1]])[:-1]


def test_tokens_of_other_programs_are_read_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.arange(500, 600)
    (tmp_path / "nano.bin").write_bytes(tokens.astype("<u2").tobytes())
    (tmp_path / "llmc.bin").write_bytes(
        struct.pack("<256i", 20240520, 1, 100, *[0] * 253) + tokens.astype("<u2").tobytes()
    )
    (tmp_path / "mega.bin").write_bytes(tokens.astype("<i4").tobytes())
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 2, 3) + struct.pack(
        "<2i2q3q", 60, 40, 0, 240, 0, 1, 2
    )
    (tmp_path / "mega.idx").write_bytes(index)
    (tmp_path / "trove.ds").write_bytes(tokens.astype("<u2").tobytes())
    (tmp_path / "trove.ds.index").write_bytes(struct.pack("<2Q", 60, 100))
    for name in ("nano.bin", "llmc.bin", "mega.bin", "trove.ds"):
        out = tmp_path / name.partition(".")[0]
        made(capsys, out, tmp_path / name, "--vocab-size", 50_257)
        assert tokens_of(out) == tokens.tolist()
        assert not list(out.glob("*.tokens")), "they are not copied"
    # Of an index whose shards lie beside it, named from where we are.
    monkeypatch.chdir(tmp_path)
    made(capsys, Path("tales"), rows(tmp_path / "tale.jsonl"))
    made(capsys, Path("again"), Path("tales/index.json"))
    assert tokens_of(tmp_path / "again") == tokens_of(tmp_path / "tales")
    # Of all these indexes one, and with a text.
    text = rows(tmp_path / "a.jsonl")
    names = [tmp_path / name for name in ("nano", "trove/index.json", "mega")]
    made(
        capsys,
        tmp_path / "all",
        *names,
        text,
        "--eos",
        "256",
        "--vocab-size",
        60_000,
        "--weights",
        3,
        2,
        1,
        9,
    )
    ended = [token for one in TEXTS for token in [*one.encode(), 256]]
    assert tokens_of(tmp_path / "all") == [*tokens.tolist() * 3, *ended]
    run, _ = opened(tmp_path / "all", 20)
    assert run.data.mixture == f"3*100 2*100 1*100 9*{len(ended)}"
    assert not opened(tmp_path / "mega", 20)[0].data.mixture, "one source is no mixture"
    index_of_all = msgspec.json.decode((tmp_path / "all" / "index.json").read_bytes(), type=Index)
    assert [(source.name, source.weight) for source in index_of_all.sources] == [
        ("nano", 3), ("index", 2), ("mega", 1), ("a", 9),
    ]  # fmt: skip


def test_what_was_made_is_not_made_again_and_several_processes_make_the_same(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [rows(tmp_path / f"{n}.jsonl", [*TEXTS, str(n)]) for n in range(3)]
    out = tmp_path / "out"
    first = made(capsys, out, *files, "--tokenizer", words, "--jobs", 2)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.tokens")}
    files[1].write_text(files[1].read_text() + '{"text": "more"}\n')
    (out / "index.json").unlink()
    second = made(capsys, out, *files, "--tokenizer", words, "--jobs", 1)
    assert first.splitlines()[1:] == second.splitlines()[1:] and first != second
    now = {path: path.stat().st_mtime_ns for path in out.glob("*.tokens")}
    assert len(before) == 3 and before.items() <= now.items() and len(now) == 4
    assert tokens_of(out) == [
        t for n in range(3) for t in expected(words, [*TEXTS, str(n), *["more"] * (n == 1)])
    ]


def dies(_: int) -> None:
    """As one that the system ends, which has no memory left."""
    os.kill(os.getpid(), 9)


@pytest.mark.process
def test_a_process_that_is_killed_is_no_bug_in_swarm() -> None:
    with pytest.raises(SetupError, match=r"was killed, as for want of memory: take fewer --jobs"):
        list(in_parallel(dies, [1, 2], 2))


def test_what_was_made_is_not_made_again_whatever_lies_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the note beside a shard nothing was left once the disk had been full: that was a bug in swarm."""
    text, out = rows(tmp_path / "a.jsonl"), tmp_path / "out"
    first = made(capsys, out, text)
    (shard,) = out.glob("*.tokens")
    before, _ = shard.stat(), shard.with_suffix(".json").write_bytes(b"")
    assert made(capsys, out, text) == first
    assert shard.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("what", ["file", "changed", "fewer", "order", "end", "weights", "no index"])
def test_the_index_of_another_data_set_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Path, what: str
) -> None:
    """A run that had pinned it could not be trained any more."""
    one, two, empty = (rows(tmp_path / f"{n}.jsonl", [n] * (n != "empty")) for n in ("one", "two", "empty"))
    with_words = ["--tokenizer", words, "--jobs", 1]
    out, given = tmp_path / "out", [one, empty, two, "--weights", 2, 1, 1, *with_words]
    first = made(capsys, out, *given)
    assert made(capsys, out, *given) == first
    if what == "changed":
        rows(two, ["two", "three"])
    if what == "no index":
        (out / "index.json").write_text("{}")
    before = {path: path.read_bytes() for path in out.iterdir()}
    others: dict[str, list[Any]] = {
        "file": [rows(tmp_path / "other.jsonl"), *with_words],
        "fewer": [one, *with_words],
        "order": [two, one, empty, "--weights", 2, 1, 1, *with_words],
        "end": [*given, "--eos", "none"],
        "weights": [one, empty, two, "--weights", 3, 1, 1, *with_words],
    }
    said = made(capsys, out, *others.get(what, given), ends=cli.Exit.SETUP)
    assert "index.json is of other data, or of these as they were" in said and "give another --out" in said
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    (out / "index.json").unlink()
    made(capsys, out, *others.get(what, given))


def test_an_ending_in_capitals_says_what_a_file_is_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was packed, and tokens, were trained on as if they were text."""
    (tmp_path / "A.TXT.GZ").write_bytes(gzip.compress(b"a tale"))
    made(capsys, tmp_path / "text", tmp_path / "A.TXT.GZ")
    assert bytes(tokens_of(tmp_path / "text")) == b"a tale"
    (tmp_path / "A.BIN").write_bytes(struct.pack("<3H", 7, 40_000, 9))
    made(capsys, tmp_path / "tokens", tmp_path / "A.BIN")
    assert tokens_of(tmp_path / "tokens") == [7, 40_000, 9]


def test_packed_tokens_are_not_taken_for_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.bin.gz", "a.ds.zst"):
        (tmp_path / name).write_bytes(gzip.compress(struct.pack("<3H", 7, 40_000, 9)))
        said = made(capsys, tmp_path / "out", tmp_path / name, ends=cli.Exit.SETUP)
        assert f"{name} has tokens, which are read as they are: unpack it" in said


@pytest.mark.parametrize(
    ("content", "words", "error"),
    [
        (
            '{"text": "a"}\n{"txt": 1}\n',
            [],
            "line 2 of .* has no text in 'text', but txt: give the right one with --field",
        ),
        ('{"text": "a"}\n{"te', [], "line 2 of .* is not JSON"),
        ("[" * 100_000 + "]" * 100_000 + "\n", [], "line 1 of .* is not JSON: maximum recursion"),
        (
            '{"text": 5}\n',
            [],
            "line 1 of .* has no text in 'text', but int in it: give the right one with --field",
        ),
        ("[1]\n", [], "line 1 of .* has no text in 'text', but list"),
        ('{"text": "a"}\n', ["--eos", "<|end|>"], "--eos <|end|>: one token for each byte has no such token"),
        ('{"text": "a"}\n', ["--weights", "1", "2"], "--weights 1 2: give one for each of the 1 files"),
        ('{"text": "a"}\n', ["--vocab-size", "50"], "vocab_size = 50 .* makes tokens up to 97"),
        (
            '{"text": "a"}\n',
            ["--vocab-size", "9999999"],
            "a vocabulary of 9999999 tokens: --vocab-size and --eos",
        ),
        (
            '{"text": "a"}\n',
            ["--eos", "9" * 30],
            "a vocabulary of 10+ tokens: --vocab-size and --eos reach to 1",
        ),
        (
            '{"text": "a"}\n',
            ["--eos", "9" * 30, "--vocab-size", "300"],
            "vocab_size = 300 .* makes tokens up to 9+: it must be",
        ),
        ('{"text": ""}\n', [], "the data have no tokens: give more text"),
        ('{"text": "a"}\n', ["--tokenizer", "gone.json"], r"cannot read the tokenizer gone\.json"),
    ],
)
def test_what_cannot_be_says_what_to_do(
    tmp_path: Path, content: str, words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    assert re.search(
        error.replace("|", r"\|"), made(capsys, tmp_path / "out", path, *words, ends=cli.Exit.SETUP)
    )


def test_a_name_that_no_index_can_hold_and_a_folder_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (b"\xff.txt", b"\xff.bin"):
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        path.write_bytes(b"ab")
        said = made(capsys, tmp_path / "out", path, ends=cli.Exit.SETUP)
        assert "is not UTF-8, as an index has to be: rename it" in said
    (tmp_path / "é.txt").write_text("ab")
    said = made(capsys, tmp_path / "é.txt" / "out", tmp_path / "é.txt", ends=cli.Exit.SETUP)
    assert re.search(r"--out .*/é\.txt is a file: give a folder", said)


def test_an_end_that_the_tokenizer_lacks_is_refused(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = rows(tmp_path / "a.jsonl")
    said = made(
        capsys, tmp_path / "o", text, "--tokenizer", words, "--eos", "<|endoftxt|>", ends=cli.Exit.SETUP
    )
    assert "--eos <|endoftxt|>: the tokenizer has no such token (did you mean <|endoftext|>?)" in said
    plain = tmp_path / "plain.json"
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(plain))
    said = made(capsys, tmp_path / "o", text, "--tokenizer", plain, ends=cli.Exit.SETUP)
    assert "no token for the end of a document that is known: name it with --eos" in said


def test_a_pattern_that_would_take_for_ever_is_an_error(tmp_path: Path) -> None:
    """The library bounds the time of a match, and ended the process with a traceback."""
    strange = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    strange.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    strange.save(str(tmp_path / "strange.json"))
    with pytest.raises(SetupError, match=r"the tokenizer fails on a text: Onig: .*retry-limit-in-match over"):
        load_tokenizer(tmp_path / "strange.json").encode("a" * 40 + "b")


@pytest.mark.parametrize(
    ("strange", "said"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
            r"is not a .tokenizers. JSON file",
        ),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "x"}}, "fails on a text: WordLevel"),
        (
            {"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 5}},
            "makes no text of some tokens",
        ),
    ],
    ids=["load", "encode", "decode"],
)
def test_what_the_library_cannot_do_for_a_strangers_file_is_said(
    tmp_path: Path, strange: dict[str, Any], said: str
) -> None:
    """Its panics are no Exceptions: `swarm generate` and others ended with a traceback."""
    plain = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).to_str())
    (tmp_path / "strange.json").write_text(json.dumps(plain | strange))
    with pytest.raises(SetupError, match=said):
        found = load_tokenizer(tmp_path / "strange.json")
        found.encode("b")
        found.decode([0])


def test_a_run_with_a_document_mask_learns_the_end_of_documents_from_the_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def masked(out: Path, **data: Any) -> Run:
        run, _ = opened(out)
        run = replace(run, data=replace(run.data, document_mask=True, **data))
        assert run.pinned == (run.data.eos >= 0), "nobody publishes it before the end is known"
        return open_dataset(run, [out]).pinned(run)

    text = rows(tmp_path / "a.jsonl")
    made(capsys, tmp_path / "ended", text, "--eos", "256")
    assert opened(tmp_path / "ended")[0].data.eos == -1, "another run does without"
    assert masked(tmp_path / "ended").data.eos == 256 and masked(tmp_path / "ended").pinned
    with pytest.raises(SetupError, match=r"documents of the index end with token 256, but data\.eos = 10 "):
        masked(tmp_path / "ended", eos=10)
    made(capsys, tmp_path / "endless", text)
    with pytest.raises(
        SetupError, match=r"nothing says which token .*: make the data with swarm tokenize --eos"
    ):
        masked(tmp_path / "endless")
    assert masked(tmp_path / "endless", eos=10).data.eos == 10
    # Tokens that are there already have the end that they are said to have.
    (tmp_path / "ready.bin").write_bytes(np.arange(500, 600).astype("<u2").tobytes())
    made(capsys, tmp_path / "ready", tmp_path / "ready.bin", "--eos", "599")
    assert masked(tmp_path / "ready").data.eos == 599


def packed_by(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content)
    if name.endswith(".zst"):
        codec = pytest.importorskip("pyarrow").Codec("zstd")
        # In two frames, and ones that are to be skipped, as pzstd writes them.
        half, skipped = len(content) // 2, struct.pack("<II", 0x184D2A50, 4) + b"skip"
        halves = (codec.compress(part, asbytes=True) for part in (content[:half], content[half:]))
        return b"".join(skipped + part for part in halves)
    path = pytest.importorskip("pyarrow").BufferOutputStream()
    table = pytest.importorskip("pyarrow").table({"text": content.decode().splitlines()})
    pytest.importorskip("pyarrow.parquet").write_table(table, path)
    return path.getvalue().to_pybytes()


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.parquet"])
def test_a_file_that_was_cut_off_or_damaged_is_never_taken_for_a_shorter_one(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, lines = tmp_path / name, "".join(f"{n * n * n} sheep\n" for n in range(60_000))
    whole = packed_by(name, lines.encode())
    path.write_bytes(whole)
    made(capsys, tmp_path / "whole", path)
    expected = lines.replace("\n", "") if name == "a.parquet" else lines
    assert bytes(tokens_of_all(tmp_path / "whole")) == expected.encode()
    for number, content in enumerate((whole[: len(whole) * 3 // 4], whole[:-1], whole[:99] + whole[150:])):
        path.write_bytes(content)
        said = made(capsys, tmp_path / f"out{number}", path, ends=cli.Exit.SETUP)
        assert f"{name} cannot be read to its end: " in said and "fetch or make it again" in said
        assert not list((tmp_path / f"out{number}").glob("*.tokens"))


def test_of_long_documents_few_are_held_at_once() -> None:
    """Of a file of 2 MB, packed, 256 of 8 MiB each took 12 GB of memory."""
    given = 0

    def documents_of(chars: int) -> Iterator[str]:
        nonlocal given
        for number in range(1, 1000):
            given = number
            yield "a" * chars

    for chars, at_once in ((1 << 20, 16), (1000, 256)):
        encoded = Tokenizer().encode_documents(documents_of(chars), None)
        assert (len(next(encoded)), given) == (at_once * chars, at_once)
        assert (len(next(encoded)), given) == (at_once * chars, 2 * at_once), "none is left out"


def test_a_document_as_long_as_a_file_is_cut_as_files_are() -> None:
    """The library takes 250 bytes for each character: for a document of 256 MiB 64 GB."""

    class Seen(Tokenizer):
        def _rows(self, texts: list[str]) -> list[np.ndarray]:
            sizes.extend(map(len, texts))
            return super()._rows(texts)

    tokenizer, sizes, long = Seen(), list[int](), "the cat sat\n" * (24 * PART_CHARS)
    assert len(long) > 1 << 24
    found = np.concatenate([*tokenizer.encode_documents(["cat", long, "hat"], 7)])
    assert max(sizes) <= PART_CHARS, "no call has more of a document"
    assert found.astype(np.uint8).tobytes() == b"cat\x07" + long.encode() + b"\x07hat\x07"


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not count what a process has")
def test_rows_are_read_in_bounded_memory() -> None:
    sizes, limit = (1, 2 * documents.MAX_UNPACKED_BYTES), resource.getrlimit(resource.RLIMIT_DATA)
    tables = documents.bounded(np.empty(size, np.uint8) for size in sizes)
    assert next(tables).nbytes == 1 and resource.getrlimit(resource.RLIMIT_DATA) == limit
    with pytest.raises(ValueError, match="a few of its rows unpack to over 4 GiB"):
        next(tables)
    assert resource.getrlimit(resource.RLIMIT_DATA) == limit
    assert len(list(documents.bounded([1, 2, 3]))) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not count what a process has")
def test_a_line_of_json_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """One of 256 MiB, packed in 300 kB, took 6.5 GB."""
    path, (soft, hard) = tmp_path / "a.jsonl", resource.getrlimit(resource.RLIMIT_DATA)
    path.write_text('{"text": "a", "more": [' + "{}," * (20 * 10**6 // 3) + "0]}\n")
    assert list(documents.texts(path, "text")) == ["a"]
    here = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(resource.RLIMIT_DATA, (here + (1 << 27), hard))
    try:
        with pytest.raises(SetupError, match=r"a\.jsonl cannot be read to its end: a few of its rows unpack"):
            list(documents.texts(path, "text"))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not count what a process has")
def test_a_table_of_a_kilobyte_that_unpacks_to_any_size_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrow, path = pytest.importorskip("pyarrow"), tmp_path / "a.parquet"
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * 1000, "int32"), ["x" * (8 << 20)])
    write = pytest.importorskip("pyarrow.parquet").write_table
    write(
        arrow.table({"text": column}), path, compression="zstd", dictionary_pagesize_limit=1 << 30,
        store_schema=False,
    )  # fmt: skip
    assert path.stat().st_size < 2000
    said = made(capsys, tmp_path / "out", path, ends=cli.Exit.SETUP)
    assert "a.parquet cannot be read to its end: a few of its rows unpack to over 4 GiB" in said


def test_a_column_that_is_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pytest.importorskip("pyarrow").table({"text": [1, 2]})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    said = made(capsys, tmp_path / "out", tmp_path / "a.parquet", ends=cli.Exit.SETUP)
    assert "a.parquet has no text in 'text', but int64 in it: give the right one with --field" in said


def test_half_a_character_is_a_question_mark(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("\\ud83d", "?"):
        (tmp_path / "a.jsonl").write_text(f'{{"text": "the {text} cat"}}')
        made(capsys, tmp_path / f"out{text[-1]}", tmp_path / "a.jsonl", "--tokenizer", words)
    assert tokens_of(tmp_path / "outd") == tokens_of(tmp_path / "out?")


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"x" * (1 << 20) + b'{"text": "a"}')
    with pytest.raises(SetupError, match=r"line 1 of .* is longer than 1 MiB: is it JSON Lines\?"):
        next(documents.texts(tmp_path / "a.jsonl", "text", most_bytes=1 << 20))


@pytest.mark.parametrize(
    ("name", "beside", "error"),
    [
        ("a.bin", None, "has 3 bytes, which are not whole tokens of uint16"),
        ("a.bin", b"something else", "a.idx is not an index of Megatron"),
        ("a.bin", MEGATRON + struct.pack("<QQ", 1 << 60, 1), "a.idx is not an index of Megatron"),
        ("a.bin", MEGATRON + struct.pack("<QQii", 2, 3, -1, 3), "a.idx is not an index of Megatron"),
        ("a.ds", struct.pack("<Q", 7), "has 3 bytes, which are not 7 tokens of uint16"),
        ("a.ds", b"", "has 3 bytes, which are not 0 tokens of uint16"),
        ("a.ds", None, "cannot read .*a.ds.index: No such file"),
    ],
)
def test_tokens_that_are_damaged_are_refused(
    tmp_path: Path, name: str, beside: bytes | None, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(b"abc")
    if beside is not None:
        (tmp_path / {"a.bin": "a.idx", "a.ds": "a.ds.index"}[name]).write_bytes(beside)
    assert re.search(error, made(capsys, tmp_path / "out", tmp_path / name, ends=cli.Exit.SETUP))


def test_tokens_that_the_type_cannot_hold_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.bin").write_bytes(np.array([1, 2, 300], "<u2").tobytes())
    said = made(capsys, tmp_path / "out", tmp_path / "a.bin", "--vocab-size", 256, ends=cli.Exit.SETUP)
    assert "it has tokens from 1 to 300, which are not uint8" in said


@pytest.mark.slow
def test_a_shard_of_one_process_is_what_another_made(tmp_path: Path) -> None:
    """The index does not depend on where its blocks were computed."""
    path = tmp_path / "a"
    path.write_bytes(np.random.default_rng(2).integers(0, 256, 9 << 20, dtype=np.uint8).tobytes())
    source = shards.Source("a", (shards.Shard(("a",), 9 << 20),))
    one = shards.make_index(tmp_path, [source], "uint8", jobs=1)
    assert shards.make_index(tmp_path, [source], "uint8", jobs=2) == one
