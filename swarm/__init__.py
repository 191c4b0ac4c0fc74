"""What every peer must agree on: rules, formats and maths. Same input, same output.

No clock, no socket, no disk, no process, no environment: those are in `peers`.

The path of a batch, file by file:

    manifest/            the public terms of a run, and their hash
    data.py              which samples microbatch (t, m) holds
    protocol/worklist.py which microbatch a trainer starts next
    policy/router.py     which peer of a stage gets it (stochastic wiring)
    policy/window.py     how many are in flight at once
    wire/messages.py     the header of a call; wire/codec.py the tensors; wire/frames.py the bytes
    model/stage.py       a stage's forward and backward, its sums, its optimizer
    protocol/ledger.py   what counts, once each; when a step is full
    protocol/rounds.py   which replicas average; what a missing peer means

Glossary. One word per idea, everywhere (tests/test_words.py finds retired ones):

    run             one training, named by the hash of its manifest
    manifest        the text with everything that changes a weight, and nothing else
    stage           a consecutive slice of the model, 0 … S-1
    cut             the stage of each operator of a model; an operator is one ATen call of a traced model
    boundary        what passes from a stage to the next: tensors forth, gradients back
    custom model    a user's model, built from installed code that the manifest names and pins
    full model      all stages as one module, without codecs
    audit model     a model whose weights count microbatches
    peer            one process of a run; without more, one that serves a stage
    replica         a peer, seen as one of several that serve the same stage
    group           the replicas that take part in one round
    membership      which peers serve which stage, by the records of a directory
    record          a peer's signed announcement of itself
    trainer         a process that holds data, starts microbatches and sees their loss
    spare           a peer that is paused because a step takes longer with it
    keeper          a process that holds checkpoints of all stages for others; it serves no stage
    bootstrap       the peer whose address others start from; it publishes the manifest
    checkpoint      a stage's whole state of one version, on a disk
    step            t = 0, 1, …: everything that makes weight version t+1 out of version t
    version         the number of steps that a set of weights has seen
    generation      the number of rollbacks of a run, and the version that the last one restored
    position        generation and version: how far a peer, a stage or the run is
    microbatch      (t, m): part m of step t, 0 <= m < M; a name, whichever peer computes it
    route           the peers, one of each stage, that a trainer chose for a microbatch
    fair queue      the peers of a stage in the order of their virtual finish times
    link latency    seconds that a call spends between two peers
    window          microbatches that a trainer keeps in flight
    sum             a peer's weight gradients of step t, added over microbatches, not yet divided by M
    ledger          which microbatches are in a peer's sum
    coverage        all M microbatches are in the ledgers of a stage, each once
    retract         take one microbatch out of a sum again, because another replica has it too
    recompute       run a microbatch again because the sum that held it is gone
    round           one attempt of a stage's replicas to add up their sums; aborted unless complete
    report          what a replica tells the coordinator of its stage; the answer, what to do, is a directive
    prepared        a stage holds the complete sum of a step: it can take it
    commit          every stage is prepared, so the step is taken
    rollback        the return of the whole run to an older version
    restore         loading a checkpoint as the state of a stage
    digest          a hash of a replica's weights; equal digests mean equal bits
    codec           how a tensor becomes bytes on the wire
    voice           how much a peer's word counts in its stage: by the steps that its voucher says
    voucher         a trainer's signature of the steps in which a peer answered; named trainers give them
    founder         a peer that the manifest names: it has voice from the start
    ticket          a trainer's signature of a microbatch, without which no stage computes it
    receipt         a peer's signature of what it answered, to which inputs
    audit           a computation of work of others again, which may show that they lied
    island          one of several swarms of a run, which meet every few steps; a cell is its part of a stage
    books           the lock under which a sum and its ledger change, in a job of the device
    owner           the key that signs a run's manifest and charter
    charter         the owner's word on which peers may take part in a run, as what; the latest holds
    trail           what a replica signs of the last steps that it took
    transcript      the trails of all stages in a file: what a run can be checked with afterwards
    role            what a process does in a run: peer, trainer or keeper
    ban             the owner's word that one peer takes no part
    token           the owner's invitation, which admits its bearer; bound to a peer by a certificate
    stamp           a number that took much work to find: the price of an identity
    backoff         the time for which a failing peer is not called
    rest            the time for which a peer is left out, since it cost the run too much
    timeout         the time after which a call is given up; an adaptive one learns from answers
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers.api.joining import join, join_async
    from peers.api.local_swarm import LocalSwarm, local
    from peers.api.run import Run
    from peers.api.steps import Reference, Step, reference

__version__ = "0.1.0"
__all__ = ("LocalSwarm", "Reference", "Run", "Step", "join", "join_async", "local", "reference")
"""What Python programs and notebooks call: of `peers.api`, imported when it is first used, each module alone,
since a description of a run needs none of the network. Nothing inside imports it from here."""
_MODULES = {"join": "joining", "join_async": "joining", "LocalSwarm": "local_swarm", "local": "local_swarm"}
_MODULES |= {"Run": "run", "Reference": "steps", "Step": "steps", "reference": "steps"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'swarm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"peers.api.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
