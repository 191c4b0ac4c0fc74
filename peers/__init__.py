"""The programs: everything that touches the clock, sockets, disk, devices, processes and logs.

__main__.py   `swarm`: cli.py, and Ctrl-C while it is imported
cli.py        swarm demo | bootstrap | peer | train | status | check
trainer.py    the loop: batch, route, call, loss, next
stage.py      the loop: serve, accumulate, average, step, save
bootstrap.py  the entry point of a run
ports.py      what the loops know of the world (Protocols)
net/          fulfils the ports with libp2p; the only importer of hivemind
disk/         datasets and checkpoints
calibrate.py  how fast a device is, by kind of operator
device.py     devices, free memory, allocator settings
events.py     what happened; display.py and the log lines are renderings of it
"""
