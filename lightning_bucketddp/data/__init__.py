"""Which samples each rank sees: exact shares for evaluation, streams, data that ends unevenly, batch sizes."""
