"""Scripts of a run and what came of them, as text.

A file is a script: lines that begin with `>` are done, lines that begin with `#` explain, all others are the
transcript of the line above, which `pytest tests/protocol --rewrite` writes anew.

    > run stages=2 microbatches=4 steps=2      first; also every=N, delayed, tied
    > add ann bob to 0                         replicas that serve stage 0, ann came first
    > newcomer cid to 0                        announces itself, and has not joined
    > joined cid
    > ann has 0 1                              it computes those microbatches of its step; `at 1`: of step 1
    > pass 1                                   seconds; reports, directives and what they ask for
    > kill ann                                 it is gone between two instructions
    > bob leaves                               it says that it goes
    > slow / > finish                          reduces wait / end
    > cut ann bob / > heal                     they do not reach each other
    > lose ReplicaReport                       the next message of that kind
    > digest ann x / > kind ann cuda           what it says of its weights and its device
    > ann dies with the commit                 when it has taken its next step, before others hear of it
    > remember directive of bob                the last that bob followed ...
    > bob hears it again                       ... comes again
    > show                                     where every replica is
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.protocol.world import World, make


def play(text: str) -> str:
    """The script with the transcript that it gives now."""
    world: World | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            if lines or line.strip():
                lines.append(line)
        elif line.startswith("> "):
            lines.append(line)
            words = line[2:].split()
            if words[0] == "run":
                world = _run(words[1:])
                continue
            assert world is not None, "a script begins with `> run`"
            do(world, words)
            lines += [f"  {said}" for said in world.said]
            world.said.clear()
            world.check()
    return "\n".join(lines).rstrip() + "\n"


def _run(words: list[str]) -> World:
    numbers = {key: int(value) for key, _, value in (word.partition("=") for word in words) if value}
    flags = {word: True for word in words if "=" not in word}
    return make(**{"stages": 1, "microbatches": 4, "steps": 2, **numbers, **flags})  # type: ignore[arg-type]


def do(world: World, words: list[str]) -> None:
    """One line of a script."""
    match words:
        case ["add", *names, "to", stage]:
            for name in names:
                world.add(name, int(stage))
        case ["newcomer", name, "to", stage]:
            world.add(name, int(stage), joined=False)
        case ["joined", name]:
            world.replicas[name].joined = True
            world.announce(world.replicas[name], "serving")
        case [name, "has", *numbers, "at", t]:
            world.compute(name, map(int, numbers), int(t))
        case [name, "has", *numbers]:
            world.compute(name, map(int, numbers))
        case ["pass", seconds]:
            world.run_for(float(seconds))
        case ["kill", *names]:
            for name in names:
                world.kill(name)
        case [name, "leaves"]:
            world.leave(name)
        case ["slow"]:
            world.slow = True
        case ["finish"]:
            world.slow = False
            world.run_for(0.0)
        case ["cut", one, other]:
            world.cuts.add(frozenset((one, other)))
        case ["heal"]:
            world.cuts.clear()
        case ["lose", kind]:
            world.losing.append(kind)
        case ["digest", name, digest]:
            world.replicas[name].digest = digest
        case ["kind", name, kind]:
            world.replicas[name].kind = kind
        case [name, "dies", "with", "the", "commit"]:
            world.doomed.add(name)
        case ["remember", "directive", "of", name]:
            directive = world.replicas[name].protocol.directive
            assert directive is not None
            world.remembered = directive
        case [name, "hears", "it", "again"]:
            assert world.remembered is not None
            again = msgspec.structs.replace(world.remembered, number=10**18)  # else it is overtaken
            world.hear(world.replicas[name], again)
        case ["show"]:
            for replica in world.live():
                steps = ", ".join(f"step {t} {step.state.value}" for t, step in replica.steps.items())
                leads = [s for s in range(world.run.S) if world.coordinates(replica, s)]
                role = f", coordinates {' and '.join(f'stage {s}' for s in leads)}" if leads else ""
                number = replica.position.generation.number
                world.say(
                    f"{replica.name}: " + (f"generation {number}, " if number else "")
                    + f"version {replica.position.version}" + (f", {steps}" if steps else "") + role
                )  # fmt: skip
        case _:
            raise ValueError(f"no such line in a script: {' '.join(words)!r}")


def check(path: Path, *, rewrite: bool) -> None:
    """Play a script; its transcript must be what the file says."""
    before = path.read_text(encoding="utf-8")
    after = play(before)
    if rewrite and after != before:
        path.write_text(after, encoding="utf-8")
    elif after != before:
        assert after.splitlines() == before.splitlines(), f"{path.name}: see `pytest {path.parent} --rewrite`"
