"""How fast a swarm is, in virtual time, with the policies of the live one.

Beside the simulation of the classes that ship (`peers.sim`), which asks what is true whatever fails, this one
asks how fast it goes. It is coarser: no messages are lost, reports take no time, an all-reduce is a formula.

    dice.py      chance from a seed
    clock.py     a heap of events
    trace.py     who is up when
    engine.py    one run, event by event: `simulate`
    world.py     what its parts share, which are:
      members.py     who comes, loads a state, serves and vanishes
      placing.py     which stage a newcomer takes, and who moves
      trainers.py    what is started, on which route, and run again
      pipeline.py    a microbatch's way through devices
      repair.py      what a death leaves behind
      steps.py       sums, reduces, the barrier
    actors.py    devices, microbatches under way, trainers: what the parts handle
    lines.py     what crosses the network, and when it has arrived
    report.py    what to assume, and what came of it
    fluid.py     stage speeds only: who serves what, and who moves; days of a trace in a second
"""
