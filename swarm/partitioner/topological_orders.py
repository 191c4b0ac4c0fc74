"""Topological orders of a graph that are worth cutting: those that keep branches together."""

from __future__ import annotations

import heapq

import numpy as np

from swarm.model.graph.ir import OpGraph
from swarm.partitioner.flops import works
from swarm.partitioner.segments import Facts

RANDOM_ORDERS = 8
"""Depth-first, with branches in a random order."""


def orders(graph: OpGraph, facts: Facts) -> list[tuple[int, ...]]:
    """Different orders, the graph's own first; one for a chain."""
    before = facts.before
    heavy: dict[int, float] = {}
    does = works(graph)
    for index, needs in before.items():
        heavy[index] = (
            does[index].flops + does[index].bytes + max((heavy[need] for need in needs), default=0.0)
        )
    light = {index: -weight for index, weight in heavy.items()}
    found = [tuple(before), _depth_first(facts, heavy), _depth_first(facts, light)]
    found += [_fewest_bytes(graph, facts), _by_depth(before)]
    rng = np.random.default_rng(0)
    for _ in range(RANDOM_ORDERS):
        ranks = rng.permutation(len(before)).tolist()
        found.append(_depth_first(facts, dict(zip(before, ranks, strict=True))))
    return list(dict.fromkeys(found))


def _depth_first(facts: Facts, rank: dict[int, float]) -> tuple[int, ...]:
    """Each operator as late as what needs it allows; of several branches that of the highest rank first."""
    before, after = facts.before, facts.after
    done: dict[int, None] = {}
    for root in [index for index in before if not after[index]]:
        stack = [(root, False)]
        while stack:
            index, ready = stack.pop()
            if index in done:
                continue
            if ready:
                done[index] = None
                continue
            stack.append((index, True))
            needs = sorted(before[index], key=lambda need: (rank[need], need))
            stack.extend((need, False) for need in needs)  # the last is done first
    return tuple(done)


def _fewest_bytes(graph: OpGraph, facts: Facts) -> tuple[int, ...]:
    """Of the operators that are ready always the one after which the fewest bytes are waited for."""
    readers: dict[str, int] = {}
    for index in facts.row:
        for name in facts.reads[index]:
            readers[name] = readers.get(name, 0) + 1
    left = {index: len(needs) for index, needs in facts.before.items()}

    def growth(index: int) -> int:
        op = graph.operators[index]
        made = sum(graph.values[name].nbytes for name in op.outputs if readers.get(name))
        return made - sum(graph.values[name].nbytes for name in facts.reads[index] if readers[name] == 1)

    ready = {index for index, count in left.items() if not count}
    order: list[int] = []
    while ready:
        index = min(ready, key=lambda one: (growth(one), one))
        ready.discard(index)
        order.append(index)
        for name in facts.reads[index]:
            readers[name] -= 1
        for following in facts.after[index]:
            left[following] -= 1
            if not left[following]:
                ready.add(following)
    return tuple(order)


def _by_depth(before: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """By the length of the longest way from an input: branches side by side."""
    depth: dict[int, int] = {}
    for index, needs in before.items():
        depth[index] = 1 + max((depth[need] for need in needs), default=0)
    heap = [(level, index) for index, level in depth.items()]
    heapq.heapify(heap)
    return tuple(heapq.heappop(heap)[1] for _ in range(len(heap)))
