"""How fast a swarm is, in virtual time, with the policies of the live one.

Beside the simulation of the protocol of steps (`swarm.sim`), which asks what is true whatever fails, this one
asks how fast it goes. It is coarser: no messages are lost, reports take no time, an all-reduce is a formula.

    trace.py     who is up when
    engine.py    one run, event by event: `simulate`
    actors.py    devices, microbatches under way, trainers
    lines.py     what crosses the network, and when it has arrived
    report.py    what to assume, and what came of it
    fluid.py     stage speeds only: who serves what, and who moves; days of a trace in a second
"""
