"""Files: tokens and checkpoints. Nothing here knows of the network."""
