"""`swarm export --hf`: what was trained is a model of transformers like any other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
from safetensors import SafetensorError

from peers.cli import Exit, main
from peers.programs import pretrained
from peers.storage import checkpoint
from peers.storage.dataset import open_dataset
from swarm.errors import SetupError
from swarm.evaluation import spread
from swarm.manifest import BatchSpec, CodecSpec, CustomModelSpec, DataSpec, Run, demo_run
from swarm.model.evaluate import given_decoder
from swarm.model.graph.custom_model import build, pin_model
from swarm.model.layout import initial_state, stage_layout

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")

GPT2 = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 256, "n_positions": 32,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
RESNET = {
    "model_type": "resnet", "architectures": ["ResNetForImageClassification"], "embedding_size": 8,
    "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3, "image_size": 16,
}  # fmt: skip


def run_of(config: dict[str, Any], **changes: Any) -> Run:
    base = demo_run(stages=2, steps=20)
    model = CustomModelSpec(kind="hf", config=json.dumps(config), stages=2, vocab_size=256)
    data = DataSpec(source="tales", sequence_length=16)
    return replace(base, model=model, data=data, codec=CodecSpec.symmetric("none"), **changes)


def trained(run: Run) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """(the model, its weights and statistics) as training may have left them."""
    module = build(run).module
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.01)
    weights = {n: t for n, t in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items()
               if "num_batches" not in n}  # fmt: skip
    return module.eval(), weights


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_language_model_is_read_without_missing_or_unexpected_names_and_generates(
    tmp_path: Path, dtype: Any
) -> None:
    run = run_of(GPT2, dtype=dtype)
    module, weights = trained(run)
    folder = tmp_path / "new" / "model"
    assert pretrained.write(folder, run, 7, weights) == "GPT2LMHeadModel"
    found, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values())
    tokens = torch.tensor([list(b"import this")])
    own = dict(module.named_parameters())
    assert all(torch.equal(own[name], tensor) for name, tensor in found.named_parameters())
    with torch.no_grad():  # not to the bit: what was read lies elsewhere in its cache lines
        torch.testing.assert_close(found(tokens).logits, module(tokens).logits, rtol=0, atol=1e-6)
    assert found.config.swarm == {"run": run.id, "name": "demo", "step": 7}
    # The text of a run of bytes: its tokenizer lies beside the model.
    words = transformers.AutoTokenizer.from_pretrained(folder)
    text = "def naïve(日本):\n\treturn '\x00' # …  "
    assert words(text)["input_ids"] == list(text.encode())
    assert words.decode(words(text)["input_ids"]) == text
    more = found.generate(
        **words("The ", return_tensors="pt"), max_new_tokens=5, min_new_tokens=5, do_sample=False
    )
    assert more.shape == (1, 9)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("terms", "name"),
    [
        ({}, "LlamaForCausalLM"),
        ({"kv_heads": 1, "head": "tied", "rotary_scaling": "linear 2"}, "LlamaForCausalLM"),
        ({"rotary_base": 500.0, "rotary_scaling": "llama3 8 1 4 16"}, "LlamaForCausalLM"),
        ({"kv_heads": 2, "qk_norm": True}, "Qwen3ForCausalLM"),
    ],
)
def test_the_built_in_decoder_is_one_that_the_world_can_load(
    tmp_path: Path, terms: dict[str, Any], name: str
) -> None:
    run = demo_run(stages=1)
    model = replace(run.model, hidden=32, heads=4, ffn_hidden=48, mlp="swiglu", **terms)
    run = replace(run, model=model, data=replace(run.data, sequence_length=40))
    weights = stage_layout(run, 0).views(initial_state(run, 0)["weights"])
    for number, tensor in enumerate(weights.values()):
        tensor += 0.2 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
    assert pretrained.write(tmp_path / "m", run, 7, weights) == name
    found, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert type(found).__name__ == name and not any(told.values())
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = given_decoder(run, weights, torch.device("cpu"))(tokens)
        assert own.abs().max() > 1.0
        torch.testing.assert_close(found(tokens).logits, own, rtol=0, atol=1e-5)


def test_statistics_of_batch_norms_are_in_it(tmp_path: Path) -> None:
    run = run_of(RESNET)
    module, weights = trained(run)
    assert pretrained.write(tmp_path / "m", run, 7, weights) == "ResNetForImageClassification"
    auto = transformers.AutoModelForImageClassification
    found, told = auto.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(told.values())
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert all(torch.equal(own[name], tensor) for name, tensor in found.named_parameters())
    with torch.no_grad():  # not to the bit: what was read lies elsewhere in its cache lines
        torch.testing.assert_close(found(images).logits, module(images).logits, rtol=0, atol=1e-6)
    counters = {int(b) for n, b in found.named_buffers() if n.endswith("num_batches_tracked")}
    assert counters == {7}, "it counts steps"


def test_only_models_of_transformers_and_only_into_a_new_folder(tmp_path: Path) -> None:
    with pytest.raises(
        SetupError, match=r'model.kind = "gpt", and transformers has the .* model.mlp = "swiglu".* --out'
    ):
        pretrained.check(tmp_path / "new", demo_run())
    narrow = replace(demo_run(), model=replace(demo_run().built_in, mlp="swiglu", bottleneck=8))
    with pytest.raises(SetupError, match=r"transformers has the .* and no model.bottleneck. Export it with"):
        pretrained.check(tmp_path / "new", narrow)
    code = replace(demo_run(), model=CustomModelSpec(kind="code", source="a.b:c", stages=3))
    with pytest.raises(SetupError, match=r'has model\.kind = "code", and it is a model of your own code'):
        pretrained.check(tmp_path / "new", code)
    (tmp_path / "full").mkdir()
    pretrained.check(tmp_path / "full", run_of(GPT2))
    (tmp_path / "full" / "x").touch()
    for there in (tmp_path / "full", tmp_path / "full" / "x"):
        with pytest.raises(SetupError, match="is there already: choose another --hf, or remove it"):
            pretrained.check(there, run_of(GPT2))


# --- the commands


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, Path]:
    """(folder of checkpoints of step 3, the run, its text)."""
    folder = tmp_path_factory.mktemp("kept")
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    run = run_of(GPT2)
    run = replace(run, data=replace(run.data, source="files"), batch=BatchSpec(
        microbatch_size=2, microbatches_per_step=2))  # fmt: skip
    run = pin_model(open_dataset(run, [text]).pinned(run))
    for stage in range(run.S):
        checkpoint.Checkpoint(folder / "ckpt", run, stage, 3).save(initial_state(run, stage), keep=9)
    return folder, run, text


@pytest.mark.slow
def test_checkpoints_and_a_file_of_them_become_the_same_folder(
    kept: tuple[Path, Run, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run, text = kept
    source = ["--checkpoint-dir", str(folder / "ckpt")]
    assert main(["export", *source, "--hf", str(folder / "one")]) == Exit.OK
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"wrote {folder / 'one'}: run demo {run.id}, step 3, 0.0 M parameters"
    assert said[1] == f'try it: transformers.GPT2LMHeadModel.from_pretrained("{folder / "one"}")'
    file = ["--model", str(folder / "model.safetensors")]
    assert main(["export", *source, "--out", file[1]]) == Exit.OK
    assert main(["export", *file, "--hf", str(folder / "two")]) == Exit.OK
    one, two = (safetensors.torch.load_file(folder / name / "model.safetensors") for name in ("one", "two"))
    expected = build(run).module.state_dict()
    assert one.keys() == two.keys() == expected.keys() - {"lm_head.weight"}, "what is tied is there once"
    assert all(torch.equal(one[n], expected[n]) and torch.equal(two[n], one[n]) for n in one)

    capsys.readouterr()
    assert main(["eval", *file, "--data", str(text), "--samples", "3", "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    tokens = torch.tensor([list(text.read_bytes()[start : start + 16]) for start in spread(2520, 17, 3)])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "one")
    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in tokens]
    assert found["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert main(["generate", *file]) == Exit.SETUP
    assert "a folder with swarm export --hf DIR, and let transformers generate" in capsys.readouterr().err


def test_a_disk_that_is_full_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, folder: Path) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    run = replace(demo_run(stages=1), model=replace(demo_run(stages=1).model, mlp="swiglu"))
    weights = stage_layout(run, 0).views(initial_state(run, 0)["weights"])
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    with pytest.raises(SetupError, match=r"cannot write the model in .*: the disk is full .* another --hf$"):
        pretrained.write(tmp_path / "m", run, 7, weights)
    assert not list(tmp_path.iterdir())


def test_which_weights_and_where_to_has_to_be_clear(
    kept: tuple[Path, Run, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, text = kept
    source = ["--checkpoint-dir", str(folder / "ckpt")]
    file = ["--model", str(folder / "none.safetensors")]
    (folder / "none.safetensors").mkdir()
    for words, told in (
        ([*file, "--out", str(tmp_path / "a.safetensors")], "a model file is made of checkpoints"),
        ([*source, "--out", str(tmp_path / "a.safetensors"), "--tokenizer", str(text)], "holds no tokenizer"),
        ([*file, "--hf", str(tmp_path / "a")], "none.safetensors"),
        ([*source, "--hf", str(tmp_path / "a"), "--tokenizer", str(text)], "the run needs no tokenizer file"),
    ):
        assert main(["export", *words]) == Exit.SETUP
        assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_of_a_run_lies_beside_its_model(tmp_path: Path) -> None:
    known = {"to": 0, "be": 1, "[UNK]": 2}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    words.save(str(path))
    run = run_of(GPT2)
    run = replace(run, data=replace(run.data, tokenizer="file"))
    pretrained.write(tmp_path / "with", run, 0, {}, path)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "with")
    assert found("to be or")["input_ids"] == [0, 1, 2]
    pretrained.write(tmp_path / "without", run, 0, {})
    assert not (tmp_path / "without" / "tokenizer.json").exists()


@pytest.mark.parametrize(("eos", "end"), [(-1, "</s>"), (1, "be"), (7, None)])
def test_other_programs_are_told_which_token_ends_a_document(
    tmp_path: Path, eos: int, end: str | None
) -> None:
    """lm-evaluation-harness begins each text with it."""
    known = {"to": 0, "be": 1, "[UNK]": 2, "</s>": 3}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]")).save(str(tmp_path / "t.json"))
    run = demo_run(stages=1)
    model = replace(run.model, hidden=32, heads=4, ffn_hidden=48, mlp="swiglu")
    data = replace(run.data, tokenizer="file", document_mask=eos >= 0, eos=eos)
    run = replace(run, model=model, data=data)
    weights = stage_layout(run, 0).views(initial_state(run, 0)["weights"])
    pretrained.write(tmp_path / "m", run, 7, weights, tmp_path / "t.json")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "m").eos_token == end
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert found.config.eos_token_id == found.generation_config.eos_token_id == (known[end] if end else None)
