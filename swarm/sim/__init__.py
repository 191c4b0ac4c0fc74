"""The throughput of a swarm in virtual time, with the policies of the live one.

Beside the simulation of the shipped classes (`peers.sim`), which tests what holds whatever fails, this one
measures speed. It is coarser: no message is lost, reports take no time, an all-reduce is a formula.

Each module imports only those above it:

    dice.py      chance from a seed
    clock.py     a heap of events
    trace.py     how many devices are up, over time
    network.py   arrival times of transfers over shared lines
    report.py    assumptions and outcome
    world.py     the state that all parts share: peers, microbatches in flight, trainers
    steps.py     sums, reduces, the barrier
    pipeline.py  the route of a microbatch through devices, and its repair
    trainers.py  starts, answers, replays
    members.py   peers that come, load a state, move and vanish
    engine.py    one run: `simulate`
"""
