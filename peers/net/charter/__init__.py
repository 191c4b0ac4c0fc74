"""The charter of a run, over the network: signed, kept in the DHT, followed, and enforced."""
