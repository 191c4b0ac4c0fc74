"""Frozen weights, and thin matrices beside them: only what is trained is summed, sent and stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.cli import Exit, main
from peers.owner.memory_limit import needs_of
from peers.programs import pretrained
from peers.storage import checkpoint
from peers.storage.dataset import open_dataset
from swarm.data import sample_offsets
from swarm.errors import SetupError
from swarm.ids import Microbatch
from swarm.manifest import LoraSpec, Run, StartSpec, demo_run, parse_run
from swarm.model.custom import model_inputs
from swarm.model.evaluate import FullModel
from swarm.model.graph.custom_model import build, custom_model
from swarm.model.reference import SingleProcess
from swarm.wire.codec import encode
from tests.model.chain import Chain
from tests.peers.storage.test_start_weights import GPT2, pin, run_of, saved
from tests.seeds import some

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")

__all__ = ("saved",)
LORA = LoraSpec(rank=3, alpha=6.0, targets=("c_attn", "mlp.c_proj"))
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 32,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


class Stages(Chain):
    """All stages of a model of transformers, fed with the text of its run."""

    def forward(self, mb: Microbatch) -> Any:
        rows = open_dataset(self.run).batch(sample_offsets(self.run, *mb))
        kept, wire = [], [encode(value, "none") for value in model_inputs(self.run, rows)]
        for stage in self.stages[:-1]:
            kept.append(stage.forward(mb, wire))
            wire = kept[-1].outputs
        return kept, wire


def lora_run(folder: Path, **changes: Any) -> Run:
    return pin(run_of(lora=LORA, **changes), folder)


def trained(run: Run) -> tuple[Stages, SingleProcess]:
    chain, single = Stages(run), SingleProcess(run, open_dataset(run).batch)
    for t in range(2):
        assert chain.step(t) == single.step(t)
    return chain, single


def test_stages_train_only_what_stands_beside_to_the_bits_of_one_process(
    saved: tuple[Path, torch.nn.Module],
) -> None:
    folder, model = saved
    run = lora_run(folder)
    chain, single = trained(run)
    ours, theirs = chain.named_weights(), single.named_weights()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    names = {f"transformer.h.{i}.{part}.lora_{m}.weight" for i in range(2)
             for part in ("attn.c_attn", "mlp.c_proj") for m in "AB"}  # fmt: skip
    assert ours.keys() == names
    assert all(bool(tensor.any()) for tensor in ours.values()), "B has left zero"
    state = chain.stages[1].state.copy()
    assert sum(len(vector) for vector in state.values()) == 3 * chain.stages[1].layout.numel
    # What is frozen is what was given.
    modules = [dict(stage._modules[0].named_buffers()) for stage in chain.stages]
    frozen = {name: tensor for module in modules for name, tensor in module.items()}
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(frozen[name], parameter.detach())
    assert "transformer.h.0.attn.c_attn.weight" in frozen


@pytest.mark.slow
def test_it_is_the_model_of_plain_torch(saved: tuple[Path, torch.nn.Module]) -> None:
    """Gradients and steps in float64, 1e-9 relative: a loop as anybody writes it, beside our sums."""
    folder, _ = saved
    still = {f"{part}_pdrop": 0.0 for part in ("attn", "embd", "resid")}
    run = pin(run_of({**GPT2, **still}, lora=LORA, dtype="float64"), folder)
    _, single = trained(run)
    plain = FullModel(run, {}).module.train()
    some = [p for p in plain.parameters() if p.requires_grad]
    spec, data = run.optimizer, open_dataset(run)
    optimizer = torch.optim.AdamW(
        some, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, weight_decay=spec.weight_decay
    )
    for t in range(2):
        for group in optimizer.param_groups:
            group["lr"] = spec.lr_at(t, run.steps)
        for m in range(run.M):
            ids, labels = model_inputs(run, data.batch(sample_offsets(run, t, m)))
            (plain(input_ids=ids.long(), labels=labels.long()).loss / run.M).backward()
        torch.nn.utils.clip_grad_norm_(some, spec.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(single.named_weights()[name], parameter, rtol=1e-9, atol=1e-12), name


@pytest.mark.slow
def test_what_is_frozen_by_name_is_no_part_of_any_sum(saved: tuple[Path, torch.nn.Module]) -> None:
    folder, model = saved
    base = run_of()
    run = pin(replace(base, model=replace(base.model, frozen=("*.wte.*", "*.wpe.*"))), folder)  # type: ignore[arg-type]
    chain, single = trained(run)
    assert chain.named_weights().keys() == {
        name for name, _ in model.named_parameters() if ".wte." not in name and ".wpe." not in name
    }
    assert all(torch.equal(w, single.named_weights()[n]) for n, w in chain.named_weights().items())
    assert parse_run(run.to_toml()) == run


def test_a_name_that_matches_nothing_is_told_with_those_that_there_are() -> None:
    with pytest.raises(
        SetupError, match=r"'q_proj' is no linear layer .* there are c_attn, c_proj, c_fc, lm_head"
    ):
        build(run_of(lora=LoraSpec(rank=2, targets=("q_proj",))))
    with pytest.raises(
        SetupError, match=r"'embed\.\*' matches no weight; there are transformer\.wte\.weight, .* mo"
    ):
        build(replace(run_of(), model=replace(run_of().model, frozen=("embed.*",))))  # type: ignore[arg-type]
    with pytest.raises(SetupError, match='it is for "hf" and "code"'):
        replace(demo_run(), lora=LORA)
    with pytest.raises(SetupError, match=r"lora\.targets = \[\].*names of linear layers"):
        LoraSpec(rank=3)
    with pytest.raises(SetupError, match=r"lora\.rank = 0.*at least 1"):
        LoraSpec(targets=("c_attn",))


def test_a_device_needs_room_for_what_is_frozen_too(saved: tuple[Path, torch.nn.Module]) -> None:
    run = lora_run(saved[0])
    frozen = sum(tensor.nbytes for tensor in custom_model(run).traced.buffers.values())
    assert sum(needs_of(run, stage).fixed for stage in range(2)) > frozen > 10_000


# --- what it becomes


@pytest.fixture(scope="module", params=some(["gpt2", "llama"], quick=["gpt2"]))
def kept(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run, dict[str, torch.Tensor]]:
    """(folder with the model it started from and checkpoints, the run, what was trained)."""
    folder, config = tmp_path_factory.mktemp("lora"), {"gpt2": GPT2, "llama": LLAMA}[request.param]
    torch.manual_seed(4)
    auto = transformers.AutoModelForCausalLM
    auto.from_config(transformers.AutoConfig.for_model(**config)).save_pretrained(folder / "base")
    targets = LORA.targets if request.param == "gpt2" else ("q_proj", "down_proj")
    run = pin(run_of(config, lora=replace(LORA, targets=targets)), folder / "base")
    chain, _ = trained(run)
    for stage, compute in enumerate(chain.stages):
        checkpoint.Checkpoint(folder / "ckpt", run, stage, 2).save(compute.state.copy(), keep=9)
    return folder, run, chain.named_weights()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([list(b"import this")])).logits


def test_an_export_for_transformers_has_it_merged(kept: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, run, weights = kept
    words = ["export", "--checkpoint-dir", str(folder / "ckpt"), "--start", str(folder / "base")]
    assert main([*words, "--hf", str(folder / "merged")]) == Exit.OK
    found, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "merged", output_loading_info=True
    )
    assert not any(told.values())
    expected = logits(FullModel(run, weights).module)
    torch.testing.assert_close(logits(found), expected, rtol=0, atol=1e-6)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    assert (logits(base) - expected).abs().max() > 1e-5
    assert main([*words[:3], "--hf", str(folder / "other"), "--start", str(folder / "ckpt")]) == Exit.SETUP
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about what peft asks it
def test_an_adapter_is_one_of_peft(kept: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    folder, run, weights = kept
    words = ["export", "--checkpoint-dir", str(folder / "ckpt"), "--start", str(folder / "base")]
    assert main([*words, "--adapter", str(folder / "adapter")]) == Exit.OK
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    model = peft.PeftModel.from_pretrained(base, folder / "adapter")
    torch.testing.assert_close(logits(model), logits(FullModel(run, weights).module), rtol=0, atol=1e-6)


def test_an_adapter_holds_what_was_trained_under_the_names_of_peft(kept: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    _, run, weights = kept
    pretrained.write_adapter(tmp_path / "new", run, 2, weights)
    found = load_file(tmp_path / "new" / "adapter_model.safetensors")
    assert found.keys() == {f"base_model.model.{name}" for name in weights}
    with pytest.raises(SetupError, match="is there already: choose another --adapter"):
        pretrained.write_adapter(tmp_path / "new", run, 2, weights)
    with pytest.raises(SetupError, match=r"--adapter takes a run with a table \[lora\]"):
        pretrained.check_adapter(tmp_path / "other", replace(run, lora=LoraSpec(), start=StartSpec()))
