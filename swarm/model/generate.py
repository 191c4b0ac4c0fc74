"""Text from trained weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from swarm.errors import SetupError
from swarm.manifest import Run
from swarm.model.evaluate import given_decoder
from swarm.model.same_bits import threads_as_before

FOR_ONE_THREAD = 20_000_000
"""With fewer weights one thread is as fast as several, which wait for one another at each of a token's many
small products. On a busy machine they wait long: 100 tokens of the demo's model took 3 s with one thread, and
with two on two cores at a load of 11 more than 100 s (2026-11-24)."""


@torch.no_grad()
def generate(
    run: Run, weights: Mapping[str, torch.Tensor], prompt_tokens: Sequence[int], n: int,
    temperature: float = 1.0, seed: int = 0, device: str | torch.device = "cpu", *,
    one_thread_below: int = FOR_ONE_THREAD, progress: Callable[[int], object] = lambda tokens: None,
) -> list[int]:  # fmt: skip
    """`n` tokens that continue the prompt, drawn at `temperature` (0: always the likeliest).

    `weights`: those of all stages by full name; with fewer numbers than `one_thread_below` one thread
    computes. The model sees the last `data.sequence_length` tokens. `progress`: told of each token.

    Raises:
        SetupError: weights are missing or have another shape, an empty prompt, or tokens that the model
            does not know.
    """
    if run.model.kind == "hf":
        raise SetupError(
            "swarm generate knows the built-in decoder only: make a folder with swarm export --hf DIR, and "
            'let transformers generate: AutoModelForCausalLM.from_pretrained("DIR").generate(...)'
        )
    if run.model.kind != "gpt":
        raise SetupError(f'model.kind = "{run.model.kind}" does not generate text')
    if not prompt_tokens or not all(0 <= token < run.model.vocab_size for token in prompt_tokens):
        raise SetupError(f"a prompt is one token or more, each from 0 to {run.model.vocab_size - 1}")
    module = given_decoder(run, weights, torch.device(device))
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt_tokens)
    with threads_as_before():
        if sum(tensor.numel() for tensor in weights.values()) < one_thread_below:
            torch.set_num_threads(1)
        for _ in range(n):
            seen = torch.tensor([tokens[-run.data.sequence_length :]], device=device)
            logits = module(seen)[0, -1].float().cpu()
            if temperature:
                chances = torch.softmax(logits / temperature, 0)
                tokens.append(int(torch.multinomial(chances, 1, generator=generator).item()))
            else:
                tokens.append(int(logits.argmax().item()))
            progress(1)
    return tokens[len(prompt_tokens) :]
