"""`bucketddp report`: the page of a recorded run."""
