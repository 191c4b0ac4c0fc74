"""Version 0 from trained weights: a folder of `save_pretrained`, a former run's export, a hub."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peers.programs.manifest_pinning import pinned
from peers.storage import fetch
from peers.storage.dataset import open_dataset
from peers.storage.start_weights import INDEX, MAX_HEADER_BYTES, open_start
from swarm.errors import SetupError
from swarm.manifest import (
    BatchSpec,
    CodecSpec,
    CustomModelSpec,
    DataSpec,
    Run,
    StartSpec,
    demo_run,
    parse_run,
)
from swarm.model import layout
from swarm.model.layout import initial_state, start_digest, start_from, start_shapes, start_tensors
from swarm.model.reference import SingleProcess
from swarm.model.stage import StageCompute
from tests.model.chain import weights_of

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")

GPT2 = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 256, "n_positions": 32,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
FOLDER = StartSpec(weights="folder")


def run_of(config: dict[str, Any] = GPT2, stages: int = 2, **changes: Any) -> Run:
    model = CustomModelSpec(kind="hf", config=json.dumps(config), stages=stages, vocab_size=256)
    data = DataSpec(source="tales", sequence_length=16)
    batch = BatchSpec(microbatch_size=2, microbatches_per_step=2)
    given = {"start": FOLDER, **changes}
    return replace(
        demo_run(stages=2, steps=4), model=model, data=data, batch=batch, codec=CodecSpec.symmetric("none"),
        optimizer=replace(demo_run().optimizer, warmup_steps=0), **given,
    )  # fmt: skip


def pin(run: Run, folder: Path | None) -> Run:
    return pinned(run, start=folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A small GPT-2 with other weights than any seed of ours draws, in two files and an index."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(123)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("*.safetensors")]) > 1
    return folder, model


@pytest.mark.slow
def test_a_folder_of_transformers_is_version_0_of_every_stage(saved: tuple[Path, torch.nn.Module]) -> None:
    folder, model = saved
    run = pin(run_of(), folder)
    own = dict(model.named_parameters())
    for stage in range(run.S):
        weights = weights_of(StageCompute(run, stage))
        assert weights and all(torch.equal(tensor, own[name].detach()) for name, tensor in weights.items())
        assert torch.equal(initial_state(run, stage)["weights"], StageCompute(run, stage).state.weights(0))
    assert SingleProcess(run, open_dataset(run).batch).named_weights().keys() == own.keys()
    assert parse_run(run.to_toml()) == run and run.pinned and len(run.start.digests) == 2


def test_a_run_that_starts_from_none_has_the_text_that_it_had() -> None:
    assert "[start]" not in demo_run().to_toml() and demo_run().start == StartSpec()


def test_of_the_files_only_a_stage_s_own_tensors_are_read(
    saved: tuple[Path, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved
    run, read = pin(run_of(), folder), 0
    weights = open_start(run, folder)
    assert weights is not None
    whole = fetch.read

    def counted(address: str, first: int, end: int, **most: int) -> bytearray:
        nonlocal read
        read += end - first
        return whole(address, first, end, **most)

    monkeypatch.setattr(fetch, "read", counted)
    start_from(run, weights)
    start_tensors(run, 1)
    assert read == 4 * sum(shape.numel() for shape in start_shapes(run, 1).values())


def test_the_weights_of_a_base_model_and_what_is_tied_are_found_by_their_other_names(
    saved: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    folder, model = saved
    tensors = {name.removeprefix("transformer."): t.detach() for name, t in model.named_parameters()}
    save_file({"lm_head.weight": tensors.pop("wte.weight"), **tensors}, tmp_path / "model.safetensors")
    assert pin(run_of(), tmp_path).start == pin(run_of(), folder).start
    assert pin(run_of(), tmp_path / "model.safetensors").start == pin(run_of(), folder).start


def test_narrow_weights_are_made_wide(saved: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    _, model = saved
    save_file({n: t.detach().bfloat16() for n, t in model.named_parameters()}, tmp_path / "model.safetensors")
    run = pin(run_of(), tmp_path)
    for name, tensor in weights_of(StageCompute(run, 0)).items():
        assert torch.equal(tensor, model.get_parameter(name).detach().bfloat16().float())


def test_the_export_of_a_built_in_run_starts_another(tmp_path: Path) -> None:
    first = replace(demo_run(stages=2, steps=4), data=DataSpec(source="tales", sequence_length=16))
    weights = {n: t + 1 for s in range(2) for n, t in weights_of(StageCompute(first, s)).items()}
    save_file(weights, tmp_path / "model.safetensors")
    run = pin(replace(first, name="second", start=FOLDER), tmp_path / "model.safetensors")
    for stage in range(2):
        found = weights_of(StageCompute(run, stage))
        assert found and all(torch.equal(tensor, weights[name]) for name, tensor in found.items())


def offsets(*places: int) -> bytes:
    """The header of a file with one tensor there."""
    return json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": places}}).encode()


def test_what_is_wrong_with_weights_is_said(saved: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    folder, model = saved
    tensors = {name: t.detach().clone() for name, t in model.named_parameters()}
    path = tmp_path / "model.safetensors"

    def refused(tensors: dict[str, torch.Tensor], words: str) -> None:
        save_file(tensors, path)
        with pytest.raises(SetupError, match=words):
            pin(run_of(), tmp_path)

    name = "transformer.h.1.mlp.c_fc.weight"
    refused({n: t for n, t in tensors.items() if n != name}, rf"has no tensor {name}.*\(27 in all\)")
    refused({**tensors, name: tensors[name][:, :3].clone()}, r"has shape \[16, 3\].*\[16, 64\]")
    for wrong in (torch.nan, torch.inf):
        refused({**tensors, name: torch.full_like(tensors[name], wrong)}, f"{name}, .* is not finite")
    too_large = torch.full_like(tensors[name], 1e300, dtype=torch.float64)
    refused({**tensors, name: too_large}, f"{name}, .* is not finite")
    refused({**tensors, name: tensors[name].int()}, f"{name} .* is I32: weights are floating")
    path.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(SetupError, match="is damaged: it ends too early"):
        pin(run_of(), tmp_path)
    nested = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    (tmp_path / INDEX).write_bytes(nested)
    with pytest.raises(SetupError, match=rf"{re.escape(INDEX)} in .* is damaged: maximum recursion"):
        pin(run_of(), tmp_path)
    (tmp_path / INDEX).unlink()
    for header in (nested, offsets(-8, 0), offsets(1 << 63, (1 << 63) + 8)):
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(SetupError, match=r"model\.safetensors in .* is no safetensors file: "):
            pin(run_of(), tmp_path)
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(SetupError, match=r"model\.safetensors in .* is no safetensors file$"):
        pin(run_of(), tmp_path)
    path.unlink()
    with pytest.raises(SetupError, match=r"model\.safetensors in .* cannot be read: .*save_pretrained"):
        pin(run_of(), tmp_path)
    with pytest.raises(SetupError, match=r'start\.weights = "folder".*--start'):
        pin(run_of(), None)
    with pytest.raises(SetupError, match=r'has no \[start\] with weights = "folder"'):
        pin(run_of(start=StartSpec()), folder)
    # Others than the run's, as a peer meets them.
    run = pin(run_of(), folder)
    save_file({**tensors, name: tensors[name] + 1}, path)
    found = open_start(run, tmp_path)
    assert found is not None
    start_from(run, found)
    wrong = [stage for stage in range(2) if name in start_shapes(run, stage)]
    with pytest.raises(SetupError, match=f"stage {wrong[0]} starts with are others here than in the run"):
        StageCompute(run, wrong[0])
    layout._readers.pop(run.id)
    with pytest.raises(SetupError, match="give their folder with --start"):
        StageCompute(run, 0)


def test_an_index_names_no_file_elsewhere(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SetupError, match=r"names '\.\./secret\.safetensors', which is no file there"):
        open_start(run_of(), tmp_path)


def test_all_headers_together_are_of_a_bounded_size(tmp_path: Path) -> None:
    """Else who reads what an owner put on a hub holds as much as he likes."""
    size = MAX_HEADER_BYTES // 3
    (tmp_path / "0").write_bytes(size.to_bytes(8, "little") + b"{}".ljust(size))
    for number in range(1, 5):
        (tmp_path / str(number)).hardlink_to(tmp_path / "0")

    def index(files: int) -> None:
        names = {f"{number}.weight": str(number) for number in range(files)}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))

    index(2)
    assert open_start(run_of(), tmp_path)
    index(5)
    with pytest.raises(SetupError, match=r"^2 in .* is no safetensors file$"):
        open_start(run_of(), tmp_path)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('weights = "hf:a/b"', "hf:OWNER/NAME@REVISION"),
        ('weights = "hf:../b@main"', "hf:OWNER/NAME@REVISION"),
        (f'weights = "folder"\ndigests = ["{"a" * 64}"]', "a list of 3, one for each stage"),
        (f'digests = ["{"a" * 64}"]', "empty when start.weights is"),
        ('weights = "folder"\ndigests = ["a"]', "64 lower-case hex digits"),
    ],
)
def test_a_manifest_that_starts_from_something_else_is_refused(table: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        parse_run(f"{demo_run().to_toml()}\n[start]\n{table}\n")


# --- a hub


@pytest.fixture
def hub(saved: tuple[Path, torch.nn.Module]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(its address, what was asked of it): the folder as revision `abc` of `me/tiny`, by ranges."""
    folder, asked = saved[0], list[tuple[str, str]]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("Range", "")))
            _, _, name = self.path.partition("/me/tiny/resolve/abc/")
            if not name or not (folder / name).is_file():
                self.send_error(404)
                return
            content = (folder / name).read_bytes()
            if told := self.headers.get("Range"):
                first, last = map(int, told.removeprefix("bytes=").split("-"))
                content = content[first : last + 1]
            self.send_response(206 if told else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_weights_of_a_hub_are_read_by_ranges(
    saved: tuple[Path, torch.nn.Module],
    hub: tuple[str, list[tuple[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, asked = hub
    monkeypatch.setenv("HF_ENDPOINT", address)
    run = pin(run_of(start=StartSpec(weights="hf:me/tiny@abc")), None)
    assert run.start.digests == pin(run_of(), saved[0]).start.digests
    assert all(told.startswith("bytes=") for path, told in asked if path.endswith(".safetensors"))
    with pytest.raises(SetupError, match="hf:me/other@abc cannot be read: HTTP 404"):
        pin(run_of(start=StartSpec(weights="hf:me/other@abc")), None)


def test_a_digest_of_what_a_stage_starts_with_sees_names_shapes_and_numbers() -> None:
    one = {"a": torch.arange(4.0), "b": torch.zeros(2)}
    others = [
        {"a": torch.arange(4.0), "c": torch.zeros(2)},
        {"a": torch.arange(4.0).view(2, 2), "b": torch.zeros(2)},
        {"a": torch.arange(4.0) + 1, "b": torch.zeros(2)},
        {"a": torch.arange(4.0), "b": torch.zeros(2).double()},
    ]
    assert start_digest(reversed(one), one.__getitem__) == start_digest(one, one.__getitem__)
    assert len({start_digest(tensors, tensors.__getitem__) for tensors in (one, *others)}) == 5


def test_load_file_agrees(saved: tuple[Path, torch.nn.Module]) -> None:
    """The library reads the same numbers."""
    folder, _ = saved
    run = pin(run_of(), folder)
    theirs = {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}
    for stage in range(2):
        assert all(torch.equal(t, theirs[n]) for n, t in start_tensors(run, stage).items())


def test_names_of_an_optimizer_that_match_nothing_are_told_with_those_that_there_are() -> None:
    run = replace(demo_run(stages=2), data=DataSpec(source="tales", sequence_length=16))
    spec = replace(run.optimizer, name="muon", muon=("layers.*",), groups=("head.* lr=0.5",))
    assert pin(replace(run, optimizer=spec), None).pinned
    with pytest.raises(
        SetupError, match=r"optimizer\.muon: 'norm\.\*' matches no weight of two .* there are tokens"
    ):
        pin(replace(run, optimizer=replace(spec, muon=("norm.*",))), None)
    with pytest.raises(SetupError, match=r"optimizer\.groups: 'haed\.\*' matches no weight that is trained"):
        pin(replace(run, optimizer=replace(spec, groups=("haed.* lr=0.5",))), None)
