"""The in-place path: the agent reads a peer's blocks where they lie, into blocks that are memory of our own."""
