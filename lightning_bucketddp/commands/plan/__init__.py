"""`bucketddp plan`: the buckets of a module, and predicted steps."""
