"""The second of two worlds: everything that `peers` asks of machines and networks, in virtual time."""
