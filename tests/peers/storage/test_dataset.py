"""Text becomes the same tokens everywhere, or an error that says what to do."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import resource
import stat
import sys
import tempfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from peers.storage import atomic_file, dataset, tokenizer
from peers.storage.dataset import open_dataset
from peers.storage.samples import open_eval
from peers.storage.tokenizer import open_tokenizer
from swarm import tales
from swarm.data import sample_offsets
from swarm.errors import SetupError
from swarm.manifest import Run, demo_run
from swarm.manifest.tables import EvalSpec
from swarm.merkle import Tree
from tests.byte_pairs import save_byte_pairs
from tests.writers import held_writer

ROOT = Path(__file__).parents[3]
SHAKESPEARE = ROOT.parent / "shared" / "data" / "text" / "tinyshakespeare.txt"

TALES = demo_run()
FILES = replace(TALES, data=replace(TALES.data, source="files", sequence_length=4))
WORDS = replace(
    FILES,
    model=replace(FILES.model, vocab_size=1000),
    data=replace(FILES.data, tokenizer="file"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setenv(dataset.CACHE_ENV, str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small text file."""
    path = tmp_path / "text.txt"
    path.write_bytes("Où est-ce?\nHere.\n".encode())
    return path


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer file: byte-level pairs, learned from a few words."""
    return save_byte_pairs(tmp_path / "tokenizer.json")


# --- what the tokens are


def root_of(raw: bytes) -> str:
    return Tree.over(lambda start, end: raw[start:end], len(raw)).root.hex()


def test_every_machine_tells_itself_the_same_tales() -> None:
    data = open_dataset(TALES)
    raw = tales.text()
    told = "829afa5faa7196ec34add3298ce565e7039ee6b0ff952d5557ad4e7d97005745"
    assert hashlib.sha256(raw).hexdigest() == told
    assert data.tokens == len(raw)
    assert data.root == root_of(raw)
    assert data.dtype == np.uint8
    run = data.pinned(TALES)
    offsets = sample_offsets(run, 3, 4)
    samples = data.batch(offsets)
    assert samples.shape == (run.batch.microbatch_size, run.data.sequence_length + 1)
    assert [bytes(row) for row in samples] == [raw[o : o + run.data.sequence_length + 1] for o in offsets]


def test_files_are_joined_in_the_order_given_with_nothing_between(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"abc")
    two.write_bytes(b"\r\n\xff\x00")
    assert bytes(open_dataset(FILES, [one, two]).batch([0, 2])[1]) == b"c\r\n\xff\x00"
    assert bytes(open_dataset(FILES, [two, one]).batch([2])[0]) == b"\xff\x00abc"


def test_a_large_vocabulary_has_wider_tokens_of_the_same_bytes(text: Path) -> None:
    wide = replace(FILES, model=replace(FILES.model, vocab_size=70_000))
    data = open_dataset(wide, [text])
    assert data.dtype == np.uint32
    assert data.batch([0])[0].tolist() == list(text.read_bytes()[:5])
    raw = np.frombuffer(text.read_bytes(), np.uint8).astype("<u4").tobytes()
    assert data.root == root_of(raw)


def test_a_tokenizer_file_makes_its_tokens(text: Path, words: Path) -> None:
    text.write_text("the cat sat\non the hat\n")
    data = open_dataset(WORDS, [text], words)
    expected = tokenizers.Tokenizer.from_file(str(words)).encode(text.read_text()).ids
    assert data.tokens == len(expected) < len(text.read_text())
    assert data.batch([0])[0].tolist() == expected[:5]
    assert data.dtype == np.uint16
    assert data.tokenizer.decode(expected) == text.read_text()
    assert data.tokenizer.encode(text.read_text()) == expected
    run = data.pinned(WORDS)
    assert run.data.tokenizer_sha256 == hashlib.sha256(words.read_bytes()).hexdigest()
    assert open_dataset(run, [text], words).tokens == data.tokens


def test_many_pieces_are_tokenized_in_order(text: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PART_CHARS", 16)
    monkeypatch.setattr(tokenizer, "_PARTS_AT_ONCE", 3)
    lines = "".join(f"the cat number {i}\n" for i in range(50))
    text.write_text(lines)
    data = open_dataset(WORDS, [text], words)
    assert data.tokenizer.decode(np.concatenate(data.batch(range(0, data.tokens - 4, 5))).tolist()) in lines


def test_a_tokenizer_that_cuts_or_fills_does_neither_here(text: Path, words: Path) -> None:
    text.write_text("the cat sat on the mat\n" * 10)
    tokens = open_dataset(WORDS, [text], words).tokens
    asked = json.loads(words.read_text())
    asked["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    words.write_text(json.dumps(asked))
    assert open_dataset(WORDS, [text], words).tokens == tokens


@given(text=st.text(alphabet="ab é\n\r€😀", max_size=200), chunk=st.integers(1, 300))
def test_pieces_depend_on_the_text_and_not_on_how_it_is_read(text: str, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PART_CHARS", 16)
        raw = text.encode()
        whole = list(tokenizer._text_parts([raw], "x"))
        assert "".join(whole) == text
        assert all(0 < len(piece) <= 16 for piece in whole)
        assert all(piece.endswith("\n") or len(piece) == 16 for piece in whole[:-1])
        chunks = [raw[start : start + chunk] for start in range(0, len(raw), chunk)]
        assert list(tokenizer._text_parts(chunks, "x")) == whole


def test_bytes_encode_and_decode_a_prompt() -> None:
    reader = open_tokenizer(TALES)
    assert reader.decode(reader.encode("Où?")) == "Où?"
    assert reader.decode([72, 105, 255, 900]) == "Hi\ufffd"


def test_shakespeare_is_a_data_set() -> None:
    if not SHAKESPEARE.exists():
        pytest.skip("tinyshakespeare.txt is not beside this checkout")
    data = open_dataset(FILES, [SHAKESPEARE])
    assert data.tokens == SHAKESPEARE.stat().st_size
    assert bytes(data.batch([0])[0]) == b"First"


@pytest.mark.slow
def test_a_file_is_never_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        for i in range(32):
            file.write(bytes([i]) * 2**20)
    tracemalloc.start()
    try:
        data = open_dataset(FILES, [path])
        assert data.batch([31 * 2**20])[0].tolist() == [31] * 5
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


# --- the cache


def test_the_second_opening_makes_nothing(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_dataset(FILES, [text])
    monkeypatch.setattr(dataset._Cache, "fill", None)
    assert open_dataset(FILES, [text]).root == first.root
    assert len(list(cache.iterdir())) == 2
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert len(files) == 4 and all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in files)


def test_a_pinned_run_needs_only_the_cache(text: Path) -> None:
    run = open_dataset(FILES, [text]).pinned(FILES)
    text.unlink()
    assert open_dataset(run).tokens == run.data.tokens


def test_changed_text_and_another_tokenizer_are_other_tokens(text: Path, words: Path) -> None:
    seen = [open_dataset(FILES, [text]).root, open_dataset(WORDS, [text], words).root]
    text.write_text("other text")
    seen += [open_dataset(FILES, [text]).root, open_dataset(WORDS, [text], words).root]
    assert len(set(seen)) == 4


@pytest.mark.parametrize("harm", ["cut", "empty", "remove", "index", "tree"])
def test_a_damaged_cache_is_made_again(
    text: Path, cache: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = open_dataset(FILES, [text])
    path = cache / good.root / {"index": "index.json", "tree": "index.tree"}.get(harm, "0.tokens")
    raw = path.read_bytes()
    if harm in ("remove", "tree"):
        path.unlink()
    else:
        path.write_bytes({"cut": raw[:-1], "empty": b"", "index": b"{"}[harm])
    assert open_dataset(FILES, [text]).root == good.root
    assert path.read_bytes() == raw
    assert "is damaged: making it again" in caplog.text


def test_a_token_that_changed_on_the_disk_is_found_when_it_is_used(text: Path, cache: Path) -> None:
    good = open_dataset(FILES, [text])
    path = cache / good.root / "0.tokens"
    raw = path.read_bytes()
    assert bytes(good.batch([0])[0]) == raw[:5]
    path.write_bytes(b"X" + raw[1:])
    for data in (good, open_dataset(FILES, [text])):
        with pytest.raises(SetupError, match=r"0\.tokens is not what the index says: .* in the cache"):
            data.batch([0])
    path.write_bytes(raw)
    assert bytes(open_dataset(FILES, [text]).batch([0])[0]) == raw[:5]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("at", ["_open", "_inside_again"])
def test_of_a_lack_of_file_descriptors_no_cache_is_said_to_be_damaged(
    text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: str, number: int
) -> None:
    data = open_dataset(FILES, [text])
    good, path = bytes(data.batch([0])[0]), data.blocks._path(0)

    def none_free(*_: object) -> Any:
        raise OSError(number, "Too many open files")

    data.blocks._inside_again.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(data.blocks, at, none_free)
        with pytest.raises(SetupError, match="no free file descriptors"):
            data.batch([0])
    assert path.exists() and "damaged" not in caplog.text
    assert bytes(data.batch([0])[0]) == good


@pytest.mark.parametrize("index", [b"", b"{", b"../../x", b"ab", b"\xff"])
def test_a_damaged_index_of_the_cache_is_made_again(text: Path, cache: Path, index: bytes) -> None:
    good = open_dataset(FILES, [text])
    (path,) = (path for path in cache.iterdir() if path.is_file())
    path.write_bytes(index)
    assert open_dataset(FILES, [text]).root == good.root


def test_many_peers_may_make_the_same_tokens_at_once(text: Path, cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: open_dataset(FILES, [text]), range(16)))
    assert len({data.root for data in opened}) == 1
    assert len(list(cache.iterdir())) == 2


def test_without_a_place_to_cache_the_tokens_go_to_an_unnamed_file(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(dataset.CACHE_ENV)
    monkeypatch.setenv("HOME", str(text))  # a file: no folder can be made in it, not even by root
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # forks of the tests end without tidying up
    data = open_dataset(FILES, [text])
    assert bytes(data.batch([0])[0]) == text.read_bytes()[:5]
    assert "cannot keep tokens in" in caplog.text
    assert "they are made again at each start" in caplog.text
    with pytest.raises(SetupError, match=r"pins 99 tokens"):  # and nothing stays open after an error
        open_dataset(_pinned("ab" * 32, 99), [text])


def test_a_cache_that_was_asked_for_and_cannot_be_is_an_error(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dataset.CACHE_ENV, str(text))
    with pytest.raises(SetupError, match=rf"cannot keep tokens in {text}: Not a directory.* set SWARM_CACHE"):
        open_dataset(FILES, [text])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_without_write_permission_is_an_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    monkeypatch.setenv(dataset.CACHE_ENV, str(locked))
    with pytest.raises(SetupError, match=r"locked: it is not writable .* set SWARM_CACHE to another folder"):
        open_dataset(FILES, [text])


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, r"the disk is full \(\d+ MiB are free\)\. Make room or do that"),
        (errno.EDQUOT, r"the disk is full .* Make room or do that"),
        (errno.EACCES, r"it is not writable \(Permission denied\)\. Allow it or do that"),
        (errno.EROFS, r"it is not writable \(Read-only file system\)\. Allow it or do that"),
        (errno.EIO, r"Input/output error\. Repair that or do that"),
    ],
)
def test_a_failed_write_says_why_and_what_to_do(tmp_path: Path, number: int, words: str) -> None:
    error = atomic_file.trouble("cannot x", tmp_path, OSError(number, os.strerror(number)), "do that")
    assert isinstance(error, SetupError)
    with pytest.raises(SetupError, match=rf"^cannot x in {tmp_path}: {words}$"):
        raise error


def test_a_full_disk_leaves_the_cache_as_it_was(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(3 * 2**20))

    def full(file: BinaryIO, data: Any) -> None:
        file.write(memoryview(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_file, "write_all", full)
    with pytest.raises(SetupError, match=r"cannot keep tokens in .*: the disk is full .* set SWARM_CACHE"):
        open_dataset(FILES, [path])
    assert list(cache.iterdir()) == []


def test_a_file_that_the_system_refuses_to_grow_is_an_error_and_is_removed(
    tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(3 * 2**20))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20 + 5, hard))
    try:
        with pytest.raises(SetupError, match=r"cannot keep tokens in .*: File too large"):
            open_dataset(FILES, [path])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(cache.iterdir()) == []
    assert open_dataset(FILES, [path]).tokens == 3 * 2**20


def test_what_a_killed_writer_left_is_swept_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from peers.storage import atomic_file as atomic\n"
        "with atomic.replacing(Path(sys.argv[1])) as (file, path):\n"
        "    print(path, flush=True); sys.stdin.read()\n"
    )
    with held_writer(program, tmp_path) as said:
        left = Path(said)
        os.utime(left, (0, 0))
        atomic_file.sweep(tmp_path)
        assert left.exists()
    assert left.exists()
    atomic_file.sweep(tmp_path)
    assert not left.exists()


def test_a_folder_that_a_killed_writer_left_is_swept_with_what_is_in_it(text: Path, cache: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from peers.storage import atomic_file as atomic\n"
        "with atomic.new_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'tokens').touch(); print(folder, flush=True); sys.stdin.read()\n"
    )
    cache.mkdir(parents=True)
    with held_writer(program, cache) as said:
        left = Path(said)
        os.utime(left.with_suffix(""), (0, 0))
        atomic_file.sweep(cache)
        assert (left / "tokens").exists()
    assert (left / "tokens").exists()
    open_dataset(FILES, [text])
    assert not list(cache.glob(f"{atomic_file.TEMPORARY}*"))


def test_a_young_temporary_file_is_left_alone(tmp_path: Path) -> None:
    young = tmp_path / (atomic_file.TEMPORARY + "x")
    young.touch()
    atomic_file.sweep(tmp_path)
    assert young.exists()


# --- what is refused


def _pinned(sha256: str, tokens: int, run: Run = FILES) -> Run:
    return replace(run, data=replace(run.data, sha256=sha256, tokens=tokens))


def test_other_files_than_the_pinned_ones_are_refused(text: Path) -> None:
    with pytest.raises(
        SetupError, match=r"not the data of the run: 18 tokens with the root .* pins 99 .* the same order"
    ):
        open_dataset(_pinned("ab" * 32, 99), [text])
    run = open_dataset(FILES, [text]).pinned(FILES)
    with pytest.raises(SetupError, match=r"not the data of the run: .* pins 17 tokens"):
        open_dataset(_pinned(run.data.sha256, 17), [text])


def test_tales_of_another_version_of_swarm_are_refused() -> None:
    with pytest.raises(SetupError, match="take the same version of swarm"):
        open_dataset(_pinned("ab" * 32, 999, TALES))


def test_fewer_tokens_than_the_manifest_counts_are_refused(text: Path) -> None:
    with pytest.raises(SetupError, match=r"the manifest speaks of 19 tokens \(data\.tokens\), here are 18"):
        open_dataset(_pinned("", 19), [text])


@pytest.mark.parametrize("raw", [b"", b"abcd"])
def test_a_text_shorter_than_a_sample_is_refused(text: Path, raw: bytes) -> None:
    text.write_bytes(raw)
    with pytest.raises(
        SetupError,
        match=rf"the data have ({len(raw)} tokens, but one sample needs 5 .*|no tokens): .*more text",
    ):
        open_dataset(FILES, [text])
    text.write_bytes(b"abcde")
    assert bytes(open_dataset(FILES, [text]).batch([0])[0]) == b"abcde"


def test_files_that_are_no_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SetupError, match=r"the data file .*nowhere\.txt cannot be read: there is no such file"
    ):
        open_dataset(FILES, [tmp_path / "nowhere.txt"])
    with pytest.raises(SetupError, match=r"is a folder: give the text files in it, such as .*/\*\.txt"):
        open_dataset(FILES, [tmp_path])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SetupError, match=r"the data file .*pipe is a pipe or a device: give a file"):
        open_dataset(FILES, [tmp_path / "pipe"])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.NDJSON", "a.parquet", "a.txt.gz", "a.jsonl.zst"])
def test_rows_and_packed_files_are_no_text_but_in_a_run_that_was_pinned_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"my {name}"
    path.write_bytes(b'{"text": "abc"}\n')
    evaluated = replace(FILES, eval=EvalSpec(every=1, samples=4, data="files"))
    for take in (lambda: open_dataset(FILES, [path]), lambda: open_eval(evaluated, [path], None)):
        with pytest.raises(SetupError, match=rf"packed, .* tokenize '{path}' --out FOLDER, and give FOLDER"):
            take()
    was = _pinned(root_of(path.read_bytes()), 16)
    assert open_dataset(was, [path]).tokens == 16


def test_a_file_that_cannot_be_opened_or_read_is_named(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    class _Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    for opened, why in ((refuse, "Permission denied"), (lambda *_: _Broken(), "Input/output error")):
        monkeypatch.setattr(Path, "open", opened)
        with pytest.raises(SetupError, match=f"^cannot read the data file {text}: {why}$"):
            list(dataset._chunks(text, lambda size: None))


def test_files_that_change_while_they_are_read_are_refused(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = dataset._Cache.lookup

    def lookup(self: Any, key: str) -> Any:
        text.write_text("other text")
        return original(self, key)

    monkeypatch.setattr(dataset._Cache, "lookup", lookup)
    with pytest.raises(SetupError, match="changed while they were read"):
        open_dataset(FILES, [text])


def test_files_are_given_exactly_when_the_run_reads_files(text: Path) -> None:
    with pytest.raises(
        SetupError, match=r'reads text files \(data\.source = "files"\): give them with --data'
    ):
        open_dataset(FILES)
    with pytest.raises(
        SetupError, match=r'\(data\.source = "tales"\), but .*text\.txt was given: leave it out'
    ):
        open_dataset(TALES, [text])


@pytest.mark.parametrize("good", [0, 10, 2**20 - 1, 2**20 + 7])
def test_text_that_is_not_utf8_is_refused_with_the_place(text: Path, words: Path, good: int) -> None:
    text.write_bytes(b"a" * good + "é".encode("latin-1") + b"tat")
    with pytest.raises(SetupError, match=rf"text\.txt is not UTF-8 \(byte {good}\).*`iconv -t UTF-8`"):
        open_dataset(WORDS, [text], words)


def test_text_that_ends_inside_a_character_is_refused(text: Path, words: Path) -> None:
    text.write_bytes(b"abc\xe2\x82")
    with pytest.raises(SetupError, match=r"not UTF-8 \(byte 3\)"):
        open_dataset(WORDS, [text], words)


def test_a_tokenizer_is_given_exactly_when_the_run_has_one(text: Path, words: Path) -> None:
    with pytest.raises(SetupError, match=r"needs its tokenizer .*: give its JSON with --tokenizer"):
        open_dataset(WORDS, [text])
    with pytest.raises(SetupError, match=r'\(data\.tokenizer = "bytes"\): leave .*tokenizer\.json out'):
        open_dataset(FILES, [text], words)


def test_a_tokenizer_that_is_none_or_another_is_refused(text: Path, words: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot read the tokenizer .*nowhere\.json: No such file"):
        open_dataset(WORDS, [text], tmp_path / "nowhere.json")
    with pytest.raises(SetupError, match=r"text\.txt is not a `tokenizers` JSON file: "):
        open_dataset(WORDS, [text], text)
    pinned = replace(WORDS, data=replace(WORDS.data, tokenizer_sha256="ab" * 32))
    with pytest.raises(
        SetupError, match=rf"is not the tokenizer of the run: its SHA-256 .* says {'ab' * 32}"
    ):
        open_dataset(pinned, [text], words)
    small = replace(WORDS, model=replace(WORDS.model, vocab_size=256))
    with pytest.raises(
        SetupError, match=r"model\.vocab_size = 256 .* tokens up to \d+: it must be at least \d+"
    ):
        open_dataset(small, [text], words)


def test_an_end_of_documents_that_the_tokenizer_does_not_make_is_refused(text: Path) -> None:
    model, data = replace(FILES.model, vocab_size=300), replace(FILES.data, document_mask=True, eos=256)
    with pytest.raises(SetupError, match=r"data\.eos = 256 .* up to 255, so no document would end"):
        open_dataset(replace(FILES, model=model, data=data), [text])
    run = replace(FILES, data=replace(data, eos=ord("\n")))
    assert open_dataset(run, [text]).pinned(run).data.eos == 10


def test_offsets_outside_the_tokens_are_our_own_mistake(text: Path) -> None:
    data = open_dataset(FILES, [text])
    data.batch([data.tokens - 5])
    for offset in (-1, data.tokens - 4):
        with pytest.raises(AssertionError, match="sample_offsets"):
            data.batch([offset])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_reading_says_how_far_it_is(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer whose files turn out to be others than the run's must not be silent until then."""
    monkeypatch.setattr(sys, "stderr", out := Terminal())
    text.write_text("some text\n" * 400_000)
    with pytest.raises(SetupError, match="the root"):
        open_dataset(replace(FILES, data=replace(FILES.data, sha256="0" * 64, tokens=9)), [text])
    assert "reading the text into tokens [" in out.getvalue() and "of 4.0 MB" in out.getvalue()
