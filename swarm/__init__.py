"""What every peer must agree on: rules, formats and maths. Same input, same output.

No clock, no socket, no disk, no process, no environment: those are in `peers`.

The path of a batch, file by file:

    run.py               the manifest: the public terms of a run, and their hash
    data.py              which samples microbatch (t, m) holds
    policy/worklist.py   which microbatch a trainer starts next
    policy/router.py     which peer of a stage gets it (stochastic wiring)
    policy/window.py     how many are in flight at once
    wire/messages.py     the header of a call; wire/codec.py the tensors; wire/frames.py the bytes
    model/stage.py       a stage's forward and backward, its sums, its optimizer
    policy/ledger.py     what counts, once each; when a step is full
    policy/rounds.py     who averages with whom; what a missing peer means

Glossary. One word per idea, everywhere:

    run          one training, named by the hash of its manifest
    manifest     the text with everything that changes a weight, and nothing else
    stage        a consecutive slice of the model's layers, 0 … S-1
    operator     one ATen call of a traced model; its graph is what any model is cut by
    cut          the stage of each operator of a model
    piece        the module of one stage of a cut
    boundary     what passes from a stage to the next: tensors forth, gradients back
    peer         one process that serves one stage
    replica      a peer, seen as one of several that serve the same stage
    trainer      a process that holds data, starts microbatches and sees their loss
    checkpoint   a stage's whole state of one version, on a disk
    keeper       a process that holds checkpoints of all stages for whoever comes; it serves no stage
    bootstrap    the peer whose address others start from; it publishes the manifest
    step         t = 0, 1, …: everything that makes weight version t+1 out of version t
    version      the number of steps that a set of weights has seen
    microbatch   (t, m): part m of step t, 0 <= m < M; a name, whoever computes it
    route        which peer of the next stage gets a microbatch, and why
    window       microbatches that a trainer keeps in flight
    sum          a peer's weight gradients of step t, added over microbatches, not yet divided by M
    ledger       which microbatches are in a peer's sum
    coverage     all M microbatches are in the ledgers of a stage, each once
    undo         take one microbatch out of a sum again, because a replica has it too
    replay       run a microbatch again because the sum that held it is gone
    round        one attempt of a stage's replicas to add their sums up; void unless whole
    barrier      every stage is prepared, so none needs version t any more
    digest       a hash of a replica's weights; equal digests mean equal bits
    codec        how a tensor becomes bytes on the wire
    ban          a peer that failed rests until its ban ends
    look         what somebody who watches a run saw of it since the last time
    doubt        what a peer says, and others or its own record contradict
    alert        what a person should look at, in a sentence
"""
