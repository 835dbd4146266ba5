"""From a gradient that autograd has made to its mean over the ranks, while backward runs."""
