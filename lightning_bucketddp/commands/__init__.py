"""The subcommands of `bucketddp`."""
