"""What Python programs and notebooks call: a run, its training on this machine, its reference, joining one.

`swarm` offers their names as its own. The commands stand on the same pieces.
"""
