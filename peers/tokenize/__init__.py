"""`swarm tokenize`: texts, and tokens that other programs made, become shards and their index."""
