"""Functions that run on every rank of a process group (see `ranks`). No pytest here: they also run without it."""
