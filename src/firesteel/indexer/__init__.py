"""The paged indexer: which keys each row's sparse attention reads, exact and deterministic."""
