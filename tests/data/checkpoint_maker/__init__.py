"""Makes the small quantised checkpoints of tests/data with the tools that own the formats."""
