"""Whatever dies, is cut off or lost: each microbatch counts once in every version of every replica (I1)."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.world import World, make

STAGES, MICROBATCHES, STEPS = 2, 3, 3
NAMES = {0: ["ann", "bob"], 1: ["cid", "dan"]}


def commands() -> st.SearchStrategy[tuple[Any, ...]]:
    """One thing that happens."""
    peer, m = st.integers(0, 5), st.integers(0, MICROBATCHES - 1)
    kinds = st.sampled_from(["ReplicaReport", "Directive", "StageSummary", "RunStatus"])
    return st.one_of(
        st.tuples(st.just("has"), peer, m),
        st.tuples(st.just("all"), peer),
        st.tuples(st.just("pass"), st.sampled_from([0.1, 0.5, 1.0, 4.0, 8.0])),
        st.tuples(st.just("kill"), peer),
        st.tuples(st.just("leave"), peer),
        st.tuples(st.just("add"), st.integers(0, STAGES - 1)),
        st.tuples(st.just("cut"), peer, peer),
        st.tuples(st.just("heal")),
        st.tuples(st.just("slow")),
        st.tuples(st.just("finish")),
        st.tuples(st.just("lose"), kinds),
        st.tuples(st.just("doom"), peer),
    )


def do(world: World, command: tuple[Any, ...]) -> None:
    live = world.live()
    match command:
        case ("has", peer, m):
            world.compute(live[peer % len(live)].name, [m])
        case ("all", peer):
            world.compute(live[peer % len(live)].name, range(MICROBATCHES))
        case ("pass", seconds):
            world.run_for(seconds)
        case ("kill", peer) if len(live) > 1:
            world.kill(live[peer % len(live)].name)
        case ("leave", peer) if len(live) > 1:
            world.leave(live[peer % len(live)].name)
        case ("add", stage) if len(world.replicas) < 9:
            world.add(f"p{len(world.replicas)}", stage)
        case ("cut", one, other):
            world.cuts.add(frozenset((live[one % len(live)].name, live[other % len(live)].name)))
        case ("heal",):
            world.cuts.clear()
        case ("slow",):
            world.slow = True
        case ("finish",):
            world.slow = False
        case ("lose", kind):
            world.losing.append(kind)
        case ("doom", peer):
            world.doomed.add(live[peer % len(live)].name)
        case _:
            pass
    world.check()


def settle(world: World) -> None:
    """From here on nothing fails, and what is lacking is computed: the run ends."""
    world.cuts.clear()
    world.losing.clear()
    world.doomed.clear()
    world.slow = False
    for stage in range(STAGES):
        if not any(replica.stage == stage for replica in world.live()):
            world.add(f"late{stage}", stage)
    for _ in range(60):
        world.run_for(2.0)
        for replica in world.live():
            others = [r for r in world.live() if r.stage == replica.stage]
            if replica is min(others, key=lambda r: r.name):
                t, had = replica.position.version, 0
                for other in others:
                    step = other.steps.get(t)
                    had |= 0 if step is None else step.ledger.done
                world.compute(replica.name, [m for m in range(MICROBATCHES) if not had >> m & 1])
        world.check()
        if all(replica.position.version == STEPS for replica in world.live()):
            return
    raise AssertionError("the run did not come to an end:\n" + "\n".join(world.said[-60:]))


@given(st.lists(commands(), max_size=40), st.booleans())
@settings(max_examples=settings.default.max_examples * 3 // 5)
def test_a_run_ends_with_one_of_each_whatever_happens(commands: list[tuple[Any, ...]], tied: bool) -> None:
    world = make(stages=STAGES, microbatches=MICROBATCHES, steps=STEPS, tied=tied)
    for stage, names in NAMES.items():
        for name in names:
            world.add(name, stage)
    for command in commands:
        do(world, command)
    settle(world)
