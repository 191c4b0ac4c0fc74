"""lm-evaluation-harness on a folder of `swarm export --hf`: it finds what the run's own decoder computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peers.cli import Exit, main
from peers.storage import checkpoint
from peers.storage.dataset import open_dataset
from peers.storage.tokenizer import load_tokenizer
from swarm.manifest import BatchSpec, Run, demo_run
from swarm.model.evaluate import given_decoder
from swarm.model.layout import initial_state, stage_layout
from tests.byte_pairs import save_byte_pairs

QUESTIONS = [
    {"text": "the cat sat on the", "choices": ["mat", "hat", "cat that sat"], "answer": 0},
    {"text": "the", "choices": ["the the", "sat"], "answer": 1},
    {"text": "the hat", "choices": ["is", "the mat on the hat"], "answer": 0},
]
TEXTS = ["the cat sat on the mat", "a hat"]


def trained(folder: Path, words: Path | None) -> tuple[Run, dict[str, torch.Tensor]]:
    """A run whose checkpoints lie in a folder, and its weights."""
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat, the hat that sat. " * 60)
    run = demo_run(stages=1)
    model = replace(run.model, vocab_size=512, hidden=32, heads=4, ffn_hidden=48, mlp="swiglu", kv_heads=2)
    data = replace(run.data, source="files", sequence_length=64, tokenizer="file" if words else "bytes")
    run = replace(run, model=model, data=data, batch=BatchSpec(microbatch_size=2, microbatches_per_step=2))
    run = open_dataset(run, [text], tokenizer=words).pinned(run)
    state = initial_state(run, 0)
    weights = stage_layout(run, 0).views(state["weights"])
    for number, tensor in enumerate(weights.values()):
        tensor += 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
    checkpoint.Checkpoint(folder / "ckpt", run, 0, 3).save(state, keep=9)
    return run, weights


@pytest.mark.filterwarnings("ignore")  # the harness has many of its own
@pytest.mark.parametrize("tokens", ["file", "bytes"])
def test_the_harness_finds_what_the_decoder_computes(tmp_path: Path, tokens: str) -> None:
    harness = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    words = save_byte_pairs(tmp_path / "words.json", "<|endoftext|>") if tokens == "file" else None
    run, weights = trained(tmp_path, words)
    given = ["--tokenizer", str(words)] if words else []
    folder = tmp_path / "model"
    assert (
        main(["export", "--checkpoint-dir", str(tmp_path / "ckpt"), "--hf", str(folder), *given]) == Exit.OK
    )

    tokenizer, decoder = load_tokenizer(words), given_decoder(run, weights, torch.device("cpu"))
    start = 10 if words is None else tokenizer.token("<|endoftext|>")
    assert start is not None

    def likelihood(context: str, text: str) -> float:
        before = tokenizer.encode(context) or [start]
        whole = torch.tensor([before + tokenizer.encode(text)])
        with torch.no_grad():
            chances = decoder(whole[:, :-1])[0].log_softmax(-1)
        return chances.gather(1, whole[0, 1:, None])[len(before) - 1 :].sum().item()

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    task = {
        "task": "cats", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(tmp_path / "cache")},
        "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    # As `lm_eval --model hf --model_args pretrained=folder` does; bytes have no end of documents.
    more = {"prefix_token_id": 10} if words is None else {}
    model = HFLM(pretrained=str(folder), device="cpu", batch_size=2, **more)
    plain = TaskManager(include_defaults=False)
    found = harness.simple_evaluate(model, tasks=[task], task_manager=plain, bootstrap_iters=0)
    best = []
    for row, sample in zip(QUESTIONS, found["samples"]["cats"], strict=True):
        expected = [likelihood(row["text"], f" {choice}") for choice in row["choices"]]
        assert [one[0][0] for one in sample["resps"]] == pytest.approx(expected, abs=1e-4)
        best.append(max(range(len(expected)), key=expected.__getitem__) == row["answer"])
    assert found["results"]["cats"]["acc,none"] == pytest.approx(sum(best) / len(best))
    # Texts without a context begin with the end of a document.
    texts = [harness.api.instance.Instance("loglikelihood_rolling", {}, (text,), 0) for text in TEXTS]
    rolled = model.loglikelihood_rolling(texts)
    assert rolled == pytest.approx([likelihood("", text) for text in TEXTS], abs=1e-4)
