"""A checkpoint is whole, verified and of this run, or it is not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.storage import atomic_file, checkpoint
from peers.storage.checkpoint import (
    Checkpoint,
    found_steps,
    load_manifest,
    newest_common_step,
    other_runs,
    saved_steps,
)
from peers.storage.checkpoint_store import CheckpointStore
from swarm.errors import SetupError
from swarm.manifest import IslandsSpec, audit_run, check_id
from tests.writers import held_writer

RUN = audit_run(stages=2)
OTHER = audit_run(stages=2, seed=2)
TENSORS = {
    "weights": torch.arange(1000, dtype=torch.float32) / 7,
    "m": torch.linspace(-1, 1, 7, dtype=torch.float64),
    "half": torch.ones(3, 5, dtype=torch.bfloat16) / 3,
    "codes": torch.arange(13, dtype=torch.uint8),
    "count": torch.tensor(12),
    "empty": torch.zeros(0, 4),
}


def _step(folder: Path, step: int) -> Path:
    return folder / RUN.id / f"step-{step:09d}"


def _file(folder: Path, stage: int, step: int) -> Path:
    (path,) = _step(folder, step).glob(f"stage-{stage}-*.safetensors")
    return path


def _save_all(folder: Path, *steps: int, keep: int = 3) -> None:
    for step in steps:
        for stage in range(RUN.S):
            Checkpoint(folder, RUN, stage, step).save(TENSORS, keep=keep)


def _everything(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*"))


# --- what is kept


def test_what_is_saved_is_loaded_bit_by_bit(tmp_path: Path) -> None:
    saved = Checkpoint(tmp_path, RUN, 1, 40)
    saved.save(TENSORS)
    path = saved.path
    assert path == _step(tmp_path, 40) / "stage-1.json"
    tensors = Checkpoint(tmp_path, RUN, 1, 40).load()
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.dictionaries(
        st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(
                [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool]
            ),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=6,
    )
)
def test_any_names_types_and_shapes_come_back(
    shapes: dict[str, tuple[torch.dtype, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in shapes.items()}
    Checkpoint(folder, RUN, 0, 1).save(tensors)
    again = Checkpoint(folder, RUN, 0, 1).load()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_the_file_is_a_safetensors_file_with_its_origin(tmp_path: Path) -> None:
    Checkpoint(tmp_path, RUN, 1, 40).save(TENSORS)
    with safetensors.safe_open(_file(tmp_path, 1, 40), "pt") as file:
        assert file.metadata() == {"run": RUN.id, "stage": "1", "step": "40"}
        assert set(file.keys()) == TENSORS.keys()
        assert torch.equal(file.get_tensor("half"), TENSORS["half"])


def test_views_and_tensors_that_share_memory_are_saved_as_what_they_show(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    Checkpoint(tmp_path, RUN, 0, 1).save({"whole": whole, "turned": whole.T, "column": whole[:, 1]})
    tensors = Checkpoint(tmp_path, RUN, 0, 1).load()
    assert torch.equal(tensors["turned"], whole.T)
    assert torch.equal(tensors["column"], whole[:, 1])


def test_the_folder_alone_tells_the_run(tmp_path: Path) -> None:
    Checkpoint(tmp_path, RUN, 0, 1).save(TENSORS)
    assert check_id(load_manifest(tmp_path, RUN.id), RUN.id) == RUN
    with pytest.raises(SetupError, match=rf"cannot read the manifest of run {OTHER.id} from .*run\.toml"):
        load_manifest(tmp_path, OTHER.id)


def test_what_an_island_saves_is_of_the_whole_run(tmp_path: Path) -> None:
    run = replace(RUN, steps=12, islands=IslandsSpec(count=2, local_steps=3))
    Checkpoint(tmp_path, run.island(1), 0, 4).save(TENSORS)
    assert check_id(load_manifest(tmp_path, run.id), run.id) == run
    assert found_steps(tmp_path, run, 0) == [4]


def test_the_newest_step_that_all_stages_have_is_the_common_one(tmp_path: Path) -> None:
    assert newest_common_step(tmp_path / "nowhere", RUN) is None
    assert newest_common_step(tmp_path, RUN) is None
    Checkpoint(tmp_path, RUN, 0, 20).save(TENSORS)
    assert newest_common_step(tmp_path, RUN) is None
    Checkpoint(tmp_path, RUN, 1, 20).save(TENSORS)
    assert newest_common_step(tmp_path, RUN) == 20
    Checkpoint(tmp_path, RUN, 0, 40).save(TENSORS)
    assert newest_common_step(tmp_path, RUN) == 20
    Checkpoint(tmp_path, RUN, 1, 40).save(TENSORS)
    assert newest_common_step(tmp_path, RUN) == 40
    assert newest_common_step(tmp_path, OTHER) is None
    assert saved_steps(tmp_path, RUN, 1) == [40, 20]


def test_old_steps_go_when_enough_newer_ones_are_there(tmp_path: Path) -> None:
    _save_all(tmp_path, 1, 2, 3, 4, 5)
    assert saved_steps(tmp_path, RUN, 0) == [5, 4, 3]
    assert not _step(tmp_path, 1).exists()
    assert not _step(tmp_path, 2).exists()


def test_the_last_common_step_stays_while_a_stage_lags(tmp_path: Path) -> None:
    _save_all(tmp_path, 1)
    for step in range(2, 9):
        Checkpoint(tmp_path, RUN, 0, step).save(TENSORS, keep=2)
    assert saved_steps(tmp_path, RUN, 0) == [8, 7, 1]
    assert newest_common_step(tmp_path, RUN) == 1
    Checkpoint(tmp_path, RUN, 1, 8).save(TENSORS, keep=2)
    Checkpoint(tmp_path, RUN, 0, 9).save(TENSORS, keep=2)
    assert newest_common_step(tmp_path, RUN) == 8
    assert saved_steps(tmp_path, RUN, 0) == [9, 8]


def test_a_damaged_step_neither_counts_as_kept_nor_as_common(tmp_path: Path) -> None:
    _save_all(tmp_path, 1, 2, 3)
    os.truncate(_file(tmp_path, 0, 3), 100)
    _step(tmp_path, 2).joinpath("stage-1.json").write_bytes(b'{"format": 1')
    Checkpoint(tmp_path, RUN, 0, 4).save(TENSORS, keep=1)
    # Step 3 is damaged in stage 0, step 2 in stage 1: step 1 is the newest that both have.
    assert newest_common_step(tmp_path, RUN) == 1
    assert saved_steps(tmp_path, RUN, 0) == [4, 1]


def test_a_damaged_step_pushes_out_no_whole_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        Checkpoint(tmp_path, RUN, 0, step).save(TENSORS, keep=9, together=[0])
    os.truncate(_file(tmp_path, 0, 3), 100)
    Checkpoint(tmp_path, RUN, 0, 4).save(TENSORS, keep=2, together=[0])
    whole = [step for step in saved_steps(tmp_path, RUN, 0) if step != 3]
    assert whole == [4, 2]


def test_an_old_step_that_was_just_written_stays(tmp_path: Path) -> None:
    _save_all(tmp_path, 1)
    for step in (5, 6, 7, 3):
        Checkpoint(tmp_path, RUN, 0, step).save(TENSORS, keep=2)
    assert saved_steps(tmp_path, RUN, 0) == [7, 6, 3, 1]
    Checkpoint(tmp_path, RUN, 1, 3).save(TENSORS, keep=2)
    assert newest_common_step(tmp_path, RUN) == 3


def test_who_keeps_one_stage_of_a_run_waits_for_no_other(tmp_path: Path) -> None:
    _save_all(tmp_path, 1)
    for step in (2, 3):
        Checkpoint(tmp_path, RUN, 0, step).save(TENSORS, keep=1, together=[0])
    assert saved_steps(tmp_path, RUN, 0) == [3]


def test_pruning_leaves_strange_files_and_other_runs_alone(tmp_path: Path) -> None:
    Checkpoint(tmp_path, OTHER, 0, 1).save(TENSORS)
    _save_all(tmp_path, 1)
    mine = _step(tmp_path, 1) / "notes.txt"
    mine.write_text("keep me")
    (tmp_path / RUN.id / "step-x").mkdir()
    _save_all(tmp_path, 2, 3, keep=1)
    assert mine.read_text() == "keep me"
    assert saved_steps(tmp_path, OTHER, 0) == [1]


def test_two_members_that_save_the_same_step_at_once_do_not_harm_each_other(tmp_path: Path) -> None:
    # They differ in a bit, as two kinds of device may.
    states = [{"weights": torch.full((100_000,), float(i % 2))} for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda state: Checkpoint(tmp_path, RUN, 0, 1).save(state), states))
    tensors = Checkpoint(tmp_path, RUN, 0, 1).load()
    assert tensors["weights"].unique().numel() == 1


# --- writing fails


@pytest.mark.parametrize("fails_at", ["manifest", "tensors", "index"])
def test_a_full_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = {"manifest": b"format = 2", "tensors": TENSORS["m"].numpy().tobytes(), "index": b'{\n "format"'}
    original = atomic_file.write_all

    def full(file: BinaryIO, data: Any) -> None:
        if bytes(data).startswith(marks[fails_at]):
            file.write(memoryview(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file, data)

    monkeypatch.setattr(atomic_file, "write_all", full)
    with pytest.raises(
        SetupError,
        match=r"cannot save the checkpoint of stage 1, step 7 in .*: the disk is full \(\d+ MiB are free\)\. "
        r"Make room or choose another folder\. Earlier checkpoints are intact",
    ):
        Checkpoint(tmp_path, RUN, 1, 7).save(TENSORS)
    left = [path.name for path in _everything(tmp_path) if path.is_file()]
    assert left == ([] if fails_at == "manifest" else ["run.toml"])
    assert not _step(tmp_path, 7).exists()


def test_a_file_that_the_system_refuses_to_grow_leaves_earlier_checkpoints_intact(tmp_path: Path) -> None:
    _save_all(tmp_path, 1)
    before = {path: path.read_bytes() for path in _everything(tmp_path) if path.is_file()}
    large = {"weights": torch.ones(2**20)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20 + 5, hard))
    try:
        with pytest.raises(
            SetupError, match=r"stage 0, step 2 in .*: File too large.* Earlier checkpoints are"
        ):
            Checkpoint(tmp_path, RUN, 0, 2).save(large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: path.read_bytes() for path in _everything(tmp_path) if path.is_file()} == before
    assert newest_common_step(tmp_path, RUN) == 1


def test_failing_to_save_a_step_again_keeps_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Checkpoint(tmp_path, RUN, 0, 1).save(TENSORS)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(atomic_file, "write_whole", full)
        with pytest.raises(SetupError, match="the disk is full"):
            Checkpoint(tmp_path, RUN, 0, 1).save(TENSORS)
    assert saved_steps(tmp_path, RUN, 0) == [1]


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"cannot save .* in .*file: Not a directory.*choose another folder"):
        Checkpoint(tmp_path / "file", RUN, 0, 1).save(TENSORS)


@pytest.mark.process
def test_a_peer_killed_while_it_saves_leaves_the_earlier_checkpoint_and_no_half_of_one(
    tmp_path: Path,
) -> None:
    _save_all(tmp_path, 1)
    program = (
        "import sys, torch; from peers.storage import atomic_file as atomic, checkpoint\n"
        "from swarm.manifest import audit_run\n"
        "write = atomic.write_all\n"
        "def slow(file, data):\n"
        "    write(file, data)\n"
        "    if len(data) > 1000: print('writing', flush=True); sys.stdin.read()\n"
        "atomic.write_all = slow\n"
        "checkpoint.Checkpoint(sys.argv[1], audit_run(stages=2), 0, 2).save({'weights': torch.ones(2**20)})\n"
    )
    with held_writer(program, tmp_path) as said:
        assert said == "writing"
    assert newest_common_step(tmp_path, RUN) == 1
    (left,) = _step(tmp_path, 2).iterdir()
    os.utime(left, (0, 0))
    _save_all(tmp_path, 2)
    assert not left.exists()
    assert newest_common_step(tmp_path, RUN) == 2


# --- reading refuses


@pytest.mark.parametrize("at", [0, 9, 300, -1])
def test_any_flipped_byte_is_noticed(tmp_path: Path, at: int) -> None:
    _save_all(tmp_path, 1, 2)
    path = _file(tmp_path, 1, 2)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    assert newest_common_step(tmp_path, RUN) == 1
    with pytest.raises(
        SetupError,
        match=r"stage-1-.*\.safetensors is damaged: its bytes are not those .*Remove that step's folder",
    ):
        Checkpoint(tmp_path, RUN, 1, 2).load()


def test_a_file_of_another_length_is_noticed(tmp_path: Path) -> None:
    _save_all(tmp_path, 1)
    path = _file(tmp_path, 0, 1)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SetupError, match=rf"is damaged: {size - 1} bytes long, not {size}"):
        Checkpoint(tmp_path, RUN, 0, 1).load()
    path.unlink()
    with pytest.raises(
        SetupError, match=r"cannot read .*\.safetensors: No such file.* Remove that step's folder"
    ):
        Checkpoint(tmp_path, RUN, 0, 1).load()
    assert newest_common_step(tmp_path, RUN) is None


def test_only_what_is_wanted_is_held_but_all_of_it_is_verified(tmp_path: Path) -> None:
    Checkpoint(tmp_path, RUN, 0, 1).save(TENSORS)
    seen: list[int] = []
    tensors = Checkpoint(tmp_path, RUN, 0, 1).load(only=("weights",), progress=seen.append)
    assert tensors.keys() == {"weights"}
    assert (
        sum(seen)
        == checkpoint.Checkpoint(tmp_path, RUN, 0, 1).size_bytes
        == _file(tmp_path, 0, 1).stat().st_size
    )


def test_a_step_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=rf"no checkpoint of stage 1, step 3 of run {RUN.id} in "):
        Checkpoint(tmp_path, RUN, 1, 3).load()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, r"has format 2; this version reads format 1"),
        ({"run": OTHER.id}, rf"is of run {OTHER.id}, not of run {RUN.id}: choose another folder"),
        ({"stage": 0}, r"is damaged: it speaks of stage 0, step 1"),
        ({"step": 2}, r"is damaged: it speaks of stage 1, step 2"),
        ({"sha256": "../../../x"}, r"is damaged: its digest is not 64 hex digits"),
        ({"bytes": "many"}, r"is damaged: Expected `int`, got `str` - at `\$\.bytes`"),
        ({"tensors": {}}, r"is damaged: its tensors are not those that its index lists"),
        ({"extra": 1}, r"is damaged: Object contains unknown field `extra`"),
        ({"meta": "x" * 2**20}, r"is damaged: longer than 1048576 bytes"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    saved = Checkpoint(tmp_path, RUN, 1, 1)
    saved.save(TENSORS)
    path = saved.path
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(SetupError, match=words):
        Checkpoint(tmp_path, RUN, 1, 1).load()


@pytest.mark.parametrize("left", [0.0, 0.1, 0.9, 0.999])
def test_a_truncated_index_or_file_is_damage_and_the_older_step_is_used(tmp_path: Path, left: float) -> None:
    _save_all(tmp_path, 1, 2)
    for path in (_step(tmp_path, 2) / "stage-1.json", _file(tmp_path, 1, 2)):
        whole = path.read_bytes()
        path.write_bytes(whole[: int(left * len(whole))])
        with pytest.raises(SetupError, match=rf"{path.name} is damaged: .*Remove that step's folder"):
            Checkpoint(tmp_path, RUN, 1, 2).load()
        told: list[str] = []
        assert not Checkpoint(tmp_path, RUN, 1, 2).is_whole(told.append)
        assert f"{path.name} is damaged" in told[0]
        assert newest_common_step(tmp_path, RUN) == 1
        assert found_steps(tmp_path, RUN, 1) == [2, 1]
        path.write_bytes(whole)
    assert newest_common_step(tmp_path, RUN) == 2


def test_a_file_that_was_found_whole_is_read_again_when_it_changes(tmp_path: Path) -> None:
    _save_all(tmp_path, 1)
    path = _file(tmp_path, 0, 1)
    read: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        verify = checkpoint.safetensors_file.verify
        patch.setattr(checkpoint.safetensors_file, "verify", lambda *a: (read.append(a[1]), verify(*a)))
        assert saved_steps(tmp_path, RUN, 0) == saved_steps(tmp_path, RUN, 0) == [1]
        assert read == [path]
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        assert saved_steps(tmp_path, RUN, 0) == []
        assert read == [path, path]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xff", b"[" * 100_000, b'"' + b"9" * 5000])
def test_an_index_that_is_no_json_is_refused(tmp_path: Path, raw: bytes) -> None:
    saved = Checkpoint(tmp_path, RUN, 1, 1)
    saved.save(TENSORS)
    path = saved.path
    path.write_bytes(raw)
    with pytest.raises(SetupError, match=r"stage-1\.json is damaged"):
        Checkpoint(tmp_path, RUN, 1, 1).load()
    assert saved_steps(tmp_path, RUN, 1) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, bad: float) -> None:
    Checkpoint(tmp_path, RUN, 0, 1).save({"weights": torch.tensor([1.0, bad])})
    with pytest.raises(SetupError, match="is damaged: weights is not finite"):
        Checkpoint(tmp_path, RUN, 0, 1).load()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"junk", "not a safetensors file"),
        ((2**60).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        (
            b'\x40\0\0\0\0\0\0\0{"weights":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(72),
            "not a safe",
        ),
        (None, r"it holds tensors of \['C64'\]"),
    ],
)
def test_a_forged_file_with_a_matching_digest_is_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    """Whoever forges both files can have any digest: what the file holds is checked as well."""
    saved = Checkpoint(tmp_path, RUN, 0, 1)
    saved.save({"weights": torch.ones(9)})
    path = saved.path
    if content is None:
        content = safetensors.torch.save({"weights": torch.zeros(1, dtype=torch.complex64)})
    digest = hashlib.sha256(content).hexdigest()
    (path.parent / f"stage-0-{digest[:16]}.safetensors").write_bytes(content)
    path.write_text(json.dumps({**json.loads(path.read_text()), "sha256": digest, "bytes": len(content)}))
    with pytest.raises(SetupError, match=f"is damaged: {words}"):
        Checkpoint(tmp_path, RUN, 0, 1).load()


def test_a_replica_that_prunes_the_same_folder_at_the_same_moment_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the thread that writes checkpoints, for good: a folder was gone when it was looked into."""
    _save_all(tmp_path, 1, 2, 3)
    glob = Path.glob

    def too_late(self: Path, pattern: str) -> Any:
        if self == _step(tmp_path, 1) and self.exists():
            shutil.rmtree(self)
            raise FileNotFoundError(self)  # as when it goes after it was seen to be there
        return glob(self, pattern)

    monkeypatch.setattr(Path, "glob", too_late)
    _save_all(tmp_path, 4, keep=2)
    assert saved_steps(tmp_path, RUN, 0) == [4, 3]


# --- what is passed over is said


def test_each_damaged_file_that_is_passed_over_is_told_with_what_is_wrong(tmp_path: Path) -> None:
    _save_all(tmp_path, 1, 2, 3)
    short, torn = _file(tmp_path, 0, 3), _step(tmp_path, 2) / "stage-1.json"
    os.truncate(short, 100)
    torn.write_bytes(b'{"format": 1')
    told: list[str] = []
    assert newest_common_step(tmp_path, RUN, tell=told.append) == 1
    assert len(told) == 2
    assert str(short) in told[0] and "is damaged" in told[0] and "100 bytes" in told[0]
    assert str(torn) in told[1] and "is damaged" in told[1]
    told.clear()
    assert saved_steps(tmp_path, RUN, 0, tell=told.append) == [2, 1]
    assert len(told) == 1 and str(short) in told[0]


def test_a_store_tells_of_a_damaged_file_once(tmp_path: Path) -> None:
    _save_all(tmp_path, 1, 2)
    os.truncate(_file(tmp_path, 0, 2), 100)
    told: list[str] = []
    store = CheckpointStore(RUN, 0, tmp_path, tell=told.append)
    assert store.versions() == store.versions() == [1]
    assert len(told) == 1 and "is damaged" in told[0]


def test_the_other_runs_of_a_folder_are_known(tmp_path: Path) -> None:
    assert other_runs(tmp_path / "nowhere", RUN) == []
    _save_all(tmp_path, 1)
    Checkpoint(tmp_path, OTHER, 0, 1).save(TENSORS)
    (tmp_path / "myrun").mkdir()
    (tmp_path / "myrun" / "run.toml").write_text(OTHER.to_toml())  # as swarm init makes it: no checkpoints
    assert other_runs(tmp_path, RUN) == [OTHER.id]


def test_a_folder_that_a_replica_removes_in_the_middle_of_a_save_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own save failed, say on a full disk, and it cleared away what looked like its own empty folder."""
    original, left = atomic_file.replacing, [2]

    def removed(folder: Path) -> Any:
        if folder.name.startswith("step-") and left[0]:
            left[0] -= 1
            folder.rmdir()
        return original(folder)

    monkeypatch.setattr(atomic_file, "replacing", removed)
    Checkpoint(tmp_path, RUN, 0, 7).save(TENSORS)
    assert left == [0] and saved_steps(tmp_path, RUN, 0) == [7]
    left[0] = 100
    with pytest.raises(SetupError, match="No such file or directory"):  # bounded: something else is wrong
        Checkpoint(tmp_path, RUN, 0, 8).save(TENSORS)


def test_a_folder_that_a_replica_removes_while_it_is_looked_at_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk it was said that the file exists, and the checkpoint was not tried again."""
    where, is_dir, left = _step(tmp_path, 7), Path.is_dir, [1]
    where.mkdir(parents=True)

    def gone(self: Path, **also: Any) -> bool:
        if self == where and left:  # it could not be made, since it was there
            left.clear()
            where.rmdir()
        return is_dir(self, **also)

    monkeypatch.setattr(Path, "is_dir", gone)
    Checkpoint(tmp_path, RUN, 0, 7).save(TENSORS)
    assert not left and saved_steps(tmp_path, RUN, 0) == [7]
