"""A tokenizer file for tests."""

from __future__ import annotations

from pathlib import Path

import tokenizers


def save_byte_pairs(path: Path, *special: str) -> Path:
    """Byte-level pairs, learned from a few words, and these tokens besides."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["the cat sat on the mat, the hat sat on the cat\n"] * 5, trainer)
    made.add_special_tokens(list(special))
    made.save(str(path))
    return path
