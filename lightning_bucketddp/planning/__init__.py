"""Which gradients share a bucket, and what that costs. Pure: no tensors, no processes."""
