"""The throughput of a swarm: coarser than the classes that ship, with their policies, loop and lines."""
