"""From gradients to their mean over the ranks: hooks, buckets, launch queue."""
