"""Little tales, told anew from their numbers: text to train on that every machine makes for itself, alike.

A small model learns them within minutes, well enough that what it writes can be read with pleasure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache

TALES = 4000

_WORDS = """\
name: Mia | Tom | Ada | Ben | Lily | Max | Nora | Finn | Rosa | Otto | Ivy | Hugo
animal: fox | hare | mouse | bear | owl | hedgehog | frog | cat | goose | mole
kind: little | brave | clever | lazy | hungry | merry | shy | curious
home: in a hollow tree | by the river | under the old bridge | on a green hill | at the edge of the forest |
  in a house of stone
day: One morning | One rainy day | One cold night | In the first days of spring | One day in autumn
thing: golden key | red apple | silver bell | lost letter | round stone | broken boat | blue lantern | tiny
  egg
place: in the grass | behind a wall | on the path | at the well | beneath the snow | between two roots
wish: wanted to keep it | wanted to give it back | did not know what it was | was afraid of it | wanted to
  sell it at the market
helper: the wind | the moon | an old crow | a wise toad | the miller | the king of the ants
advice: What you share grows | Ask those who came before you | Slow feet find the way | A friend is worth
  more than gold | Do not go alone | What is lost wants to be found
way: over the hills | through the dark forest | across the river | up the long stairs | down into the valley
trouble: it began to rain: laughed and went on | the night came early: made a fire and waited | the bridge
  was gone: built a raft of branches | they lost the path: followed the stars | a wolf stood in the way:
  told it a story until it slept | they were afraid: held hands and sang
feast: ate honey cake | drank warm milk | danced until morning | shared a big soup | baked bread
end: And they were never lonely again | And if you listen, you can still hear them laugh | And that is why
  the bell rings every evening | And nobody in the valley ever forgot it | And from that day on the door was
  always open
"""
"""What may stand in a slot of a sentence. A trouble has its way out behind it."""

_SENTENCES = (
    (
        "Once upon a time there was a {kind} {animal} who was called {name} and lived {home}.",
        "Once there lived a {kind} {animal} {home}. Everybody called the {animal} {name}.",
    ),
    ("{day} {name} found a {thing} {place}.", "{day} there lay a {thing} {place}, and {name} picked it up."),
    ("{name} {wish}.", "The {animal} {wish}, and thought about it all night."),
    ('Then {helper} said: "{advice}."', '"{advice}," said {helper}, and was gone.'),
    (
        "So {name} went to see {friend} the {other}, and together they walked {way}.",
        "So {name} called {friend} the {other}, and they set out {way}.",
    ),
    ("Then {trouble}, but they {rescue}.", "Soon {trouble}. What could they do? They {rescue}."),
    (
        "At last they came home with the {thing} and {feast}.",
        "In the end they put the {thing} over the door and {feast}.",
    ),
    ("{end}.",),
)


_SLOTS = {
    slot: [" ".join(choice.split()) for choice in choices.split("|")]
    for slot, choices in re.findall(r"^(\w+): (.*(?:\n  .*)*)", _WORDS, re.MULTILINE)
}


@cache
def text(tales: int = TALES) -> bytes:
    """All of them, an empty line between."""
    return "\n\n".join(_tale(number) for number in range(tales)).encode() + b"\n"


def _tale(number: int) -> str:
    chance = iter(hashlib.shake_256(f"swarm tale {number}".encode()).digest(64))
    words = {slot: _one(choices, chance) for slot, choices in _SLOTS.items()}
    words["friend"] = _one([name for name in _SLOTS["name"] if name != words["name"]], chance)
    words["other"] = _one([animal for animal in _SLOTS["animal"] if animal != words["animal"]], chance)
    words["trouble"], _, words["rescue"] = words["trouble"].partition(": ")
    return " ".join(_one(forms, chance) for forms in _SENTENCES).format(**words)


def _one(choices: Sequence[str], chance: Iterator[int]) -> str:
    return choices[next(chance) % len(choices)]
