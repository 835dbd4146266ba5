"""The reducer and its parts. Knows torch, never Lightning.

One noun per file, and a file imports only files to its left:

    config -> plan -> bucket -> placement -> collectives -> wire -> stats -> reductions -> replicas -> reducer
    ... collectives -> lockstep -> weighting -> reducer
    ... collectives -> sync_batchnorm
    config -> compiled
    network -> collectives
"""
