"""The only importer of hivemind: the libp2p daemon, calls between peers, and the DHT."""
