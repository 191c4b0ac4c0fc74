"""A trained model as a folder that Hugging Face's transformers reads: `from_pretrained(FOLDER)`.

transformers writes it, so names, shards, tied weights and configs are its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch

from peers.storage import atomic_file, safetensors_file
from peers.storage.atomic_file import as_setup_error
from peers.storage.tokenizer import open_tokenizer
from peers.tokenize.make import ENDS
from swarm.errors import SetupError
from swarm.manifest import CustomModelSpec, ModelSpec, Run
from swarm.model.evaluate import FullModel
from swarm.model.gpt import NORM_EPS
from swarm.model.graph.custom_model import build
from swarm.model.graph.lora import adapted, is_adapter, is_transposed, merge

WHY_NOT = {
    "gpt": 'transformers has the built-in decoder only with model.mlp = "swiglu", model.norm = "rmsnorm", '
    'model.positions = "rotary" and no model.bottleneck',
    "counting": "the audit model is of no use outside its audit",
    "code": "it is a model of your own code, whose load_state_dict takes the names in a file of --out",
}

_ROTARY = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Of `model.rotary_scaling`, as transformers calls them."""


def check(folder: Path, run: Run) -> None:
    """Raise SetupError if the model is none of transformers, or `folder` has something in it."""
    if run.model.kind != "hf" and not is_llama(run.model):
        raise SetupError(
            f'--hf takes a model of transformers; this one has model.kind = "{run.model.kind}", and '
            f"{WHY_NOT[run.model.kind]}. Export it with --out FILE"
        )
    _check_new(folder, "--hf")


def check_adapter(folder: Path, run: Run) -> None:
    """Raise SetupError if the run trains no adapter, or `folder` has something in it."""
    if not run.lora.rank:
        raise SetupError("--adapter takes a run with a table [lora]; export this one with --hf or --out")
    _check_new(folder, "--adapter")


def _check_new(folder: Path, option: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SetupError(f"{folder} is there already: choose another {option}, or remove it")


def write(
    folder: Path, run: Run, step: int, weights: Mapping[str, torch.Tensor], tokenizer: Path | None = None
) -> str:
    """Write the model into `folder`, which comes into being whole or not at all.

    Args:
        weights: parameters and batch norms' statistics of all stages by full name; adapters are merged.
        tokenizer: the JSON of a run whose tokenizer is a file, to be put beside the model; bytes need none.

    Returns:
        The name of the class whose `from_pretrained` reads it.

    Raises:
        SetupError: it cannot be written, as where `check` refuses; or the tokenizer is not the run's.
    """
    words: Any = _tokenizer(run, tokenizer)
    end = words and _end(run, words)
    module: Any
    if isinstance(run.model, ModelSpec):
        module = as_llama(run, run.model, weights)
        module.config.eos_token_id = module.generation_config.eos_token_id = end and words.token_to_id(end)
    else:
        module = FullModel(run, weights, steps=step).module
        merge(module, run.lora)
    transformers = importlib.import_module("transformers")
    if hasattr(module.config, "use_cache"):
        module.config.use_cache = True  # training has no use for it; generation has
    module.config.swarm = {"run": run.id, "name": run.name, "step": step}
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with _new_folder(folder, "--hf") as new:
            module.save_pretrained(new)
            if words is not None:
                transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end).save_pretrained(
                    new
                )
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
    return type(module).__name__


def is_llama(model: ModelSpec | CustomModelSpec) -> bool:
    """Whether it is the built-in decoder, and one of transformers: Llama, or Qwen 3 if it has `qk_norm`."""
    if not isinstance(model, ModelSpec) or model.bottleneck:
        return False
    return (model.kind, model.mlp, model.norm, model.positions) == ("gpt", "swiglu", "rmsnorm", "rotary")


def as_llama(run: Run, model: ModelSpec, weights: Mapping[str, torch.Tensor]) -> Any:
    """The built-in decoder with these weights, by full name, as transformers has it."""
    transformers: Any = importlib.import_module("transformers")
    N, K, D = model.heads, model.key_heads, model.hidden // model.heads
    kind = "Qwen3" if model.qk_norm else "Llama"
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.rotary_scaling:
        rotary |= dict(zip(_ROTARY, model.scaling, strict=False), rope_type=model.rotary_scaling.split()[0])
        rotary |= {name: int(value) for name, value in rotary.items() if name == _ROTARY[-1]}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocab_size, hidden_size=model.hidden, intermediate_size=model.ffn_hidden,
        num_hidden_layers=model.layers, num_attention_heads=N, num_key_value_heads=K, head_dim=D,
        max_position_embeddings=run.data.sequence_length, rms_norm_eps=NORM_EPS, rope_parameters=rotary,
        tie_word_embeddings=model.head == "tied", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip

    def halves(rows: torch.Tensor) -> torch.Tensor:
        """Pairs of channels that turn together: neighbours here, a half apart there."""
        return rows.unflatten(0, (-1, D // 2, 2)).transpose(1, 2).flatten(0, 2)

    found = {
        "model.embed_tokens.weight": weights["tokens.weight"],
        "model.norm.weight": weights["norm.weight"],
        "lm_head.weight": weights["tokens.weight" if model.head == "tied" else "head.weight"],
    }
    for layer in range(model.layers):
        own = {
            name: weights[f"layers.{layer}.{name}.weight"]
            for name in ("norm1", "norm2", "qkv", "out", "up", "down")
        }
        q, k, v = own["qkv"].split([N * D, K * D, K * D])
        gate, up = own["up"].chunk(2)
        parts = {
            "input_layernorm": own["norm1"], "post_attention_layernorm": own["norm2"],
            "self_attn.q_proj": halves(q), "self_attn.k_proj": halves(k), "self_attn.v_proj": v,
            "self_attn.o_proj": own["out"], "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": own["down"],
        }  # fmt: skip
        if model.qk_norm:
            for name in ("q_norm", "k_norm"):
                parts[f"self_attn.{name}"] = halves(weights[f"layers.{layer}.{name}.weight"])
        found |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    module = getattr(transformers, f"{kind}ForCausalLM")(config)
    module.load_state_dict(found)
    return module


def write_adapter(folder: Path, run: Run, step: int, weights: Mapping[str, torch.Tensor]) -> None:
    """Write what a run with a [lora] has trained as peft has it, into `folder`: all of it or nothing. Raises
    SetupError: as `check_adapter`, or it cannot be written."""
    check_adapter(folder, run)
    spec, made = run.lora, build(run)
    config = {
        "peft_type": "LORA", "r": spec.rank, "lora_alpha": spec.alpha, "target_modules": list(spec.targets),
        "fan_in_fan_out": any(is_transposed(layer) for _, layer in adapted(made.module)), "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": run.start.weights.removeprefix("hf:").partition("@")[0],
        "revision": run.start.weights.partition("@")[2] or None,
        "task_type": "CAUSAL_LM" if "CausalLM" in type(made.module).__name__ else None,
    }  # fmt: skip
    tensors = {f"base_model.model.{name}": weights[name] for name in sorted(weights) if is_adapter(name)}
    with _new_folder(folder, "--adapter") as temporary:
        (temporary / "adapter_config.json").write_text(json.dumps(config, indent=1))
        with (temporary / "adapter_model.safetensors").open("wb") as file:
            safetensors_file.write(
                file, tensors, tensors.__getitem__, {"format": "pt", "run": run.id, "step": str(step)}
            )


@contextlib.contextmanager
def _new_folder(folder: Path, option: str) -> Iterator[Path]:
    """A folder beside, which takes the place of `folder` once all is in it."""
    with as_setup_error("cannot write the model", f"choose another {option}", folder=folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file.new_folder(folder.parent) as temporary:
            yield temporary
            temporary.chmod(0o755)
            temporary.replace(folder)
            atomic_file.sync_folder(folder.parent)


def _tokenizer(run: Run, path: Path | None) -> tokenizers.Tokenizer | None:
    """The run's; None: of a file that was not given, or of no text."""
    if run.data.source == "code":
        return None
    if run.data.tokenizer == "bytes":
        open_tokenizer(run, path)  # a file would not be the run's
        return byte_tokenizer()
    if path is None:
        return None
    open_tokenizer(run, path)  # says what is wrong with it
    return tokenizers.Tokenizer.from_file(str(path))


def _end(run: Run, words: tokenizers.Tokenizer) -> str | None:
    """The token behind each document, which other programs ask for; None: unknown."""
    names = [words.id_to_token(run.data.eos)] if run.data.eos >= 0 else ENDS
    return next((name for name in names if name and words.token_to_id(name) is not None), None)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Text as UTF-8, a token a byte.

    `ByteLevel` stands each byte for a visible character, as GPT-2's tokenizer does (Radford et al., 2019).
    """
    convert: Any = importlib.import_module("transformers.convert_slow_tokenizer")
    vocabulary = {shown: byte for byte, shown in convert.bytes_to_unicode().items()}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made
