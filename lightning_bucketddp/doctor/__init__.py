"""Looks at a machine or a cluster before a long run. On each rank parts `observe`; on rank 0 they `judge` all of it."""
