"""Swarms in virtual time: one seed, no clock, no socket, exact replay.

What any simulation needs:

    dice.py       chance from a seed
    clock.py      a heap of events; processes that die, stop and go on; coroutines that wait
    network.py    calls over lines that lose, double, delay and reorder, and can be cut

The protocol of steps, under random faults, with the real policies of `swarm.policy`:

    terms.py      the run, what its processes say to each other, who is announced
    peer.py       a stage peer, with counts of one-hot gradients instead of tensors
    council.py    its reports and briefs
    paused.py     one whose owner wants the device
    probe.py      asking the silent
    trainer.py    a trainer without data
    check.py      the invariants, read off the weights
    faults.py     what goes wrong
    world.py      one swarm and one schedule of faults
    __main__.py   ten thousand of them: `python -m swarm.sim --help`

How fast a swarm is, with the same policies, is asked in `throughput/`: it shares the clock and the dice.

The actors mirror those of `peers`, which cannot be imported from here: a change of the protocol there is made
here too, and tried on ten thousand schedules.
"""
