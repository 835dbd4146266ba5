"""The reducer and its parts. Knows torch, never Lightning.

One noun per file, and a file imports only files to its left:

    config -> plan -> bucket -> flags -> placement -> collectives -> wire -> stats -> reductions -> backward_pass
    ... backward_pass -> reducer
    ... collectives -> replicas -> nonfinite -> reductions
    ... collectives -> lockstep -> weighting -> reducer
    ... collectives -> sync_batchnorm
    config -> compiled
    network -> collectives
"""
