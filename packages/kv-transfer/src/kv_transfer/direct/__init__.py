"""The direct path: a receiver reads its peer's blocks where they lie, straight into blocks of its own."""
