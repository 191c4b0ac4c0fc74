"""`swarm generate`: trained weights continue a text. Needs no network and no other peer."""

from __future__ import annotations

from peers.options import GenerateOptions
from peers.storage.dataset import open_tokenizer
from peers.storage.weights import load_weights
from swarm.model.generate import generate


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
