"""Lightning's own tests, with `bucketddp` in the place of `ddp`."""
