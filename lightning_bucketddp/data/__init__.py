"""Which samples each rank sees: evaluation, streams, uneven data, batch sizes, resuming."""
