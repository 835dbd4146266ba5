"""The same weights and buffers on every rank: checksums, checks, SyncBatchNorm."""
