"""One stage of a run, served on one device: microbatches, steps, and the replicas that share them."""
