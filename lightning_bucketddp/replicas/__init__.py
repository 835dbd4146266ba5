"""The same weights and buffers on every rank: comparing, broadcasting, checking, SyncBatchNorm."""
