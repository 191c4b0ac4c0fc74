"""`swarm generate`: trained weights continue a text. Needs no network and no other peer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peers.disk.dataset import open_tokenizer
from peers.weights import WeightsOptions, load_weights
from swarm.model.generate import generate


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(WeightsOptions):
    """What to continue, and with which weights."""

    tokenizer: Path | None = None
    prompt: str = "The "
    tokens: int = 200
    temperature: float = 0.8
    seed: int = 0
    device: str = "cpu"


def run_generate(options: GenerateOptions) -> None:
    """Print the prompt and its continuation."""
    from peers.device import choose_device

    device = choose_device(options.device)
    model = load_weights(options)
    tokenizer = open_tokenizer(model.run, options.tokenizer)
    prompt = tokenizer.encode(options.prompt)
    more = generate(
        model.run, model.by_name, prompt, options.tokens, options.temperature, options.seed, device
    )
    print(options.prompt + tokenizer.decode(more))
