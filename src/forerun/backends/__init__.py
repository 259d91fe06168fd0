"""The target (and any draft model): a network with a cache of many sequences, behind one `Session`."""
