"""The reducer and its parts. Knows torch, never Lightning.

One noun per file, and a file imports only files to its left:

    config -> plan -> bucket -> flags -> placement -> collectives -> wire -> stats -> reductions -> backward_pass
    ... backward_pass -> reducer
    ... collectives -> replicas -> nonfinite -> reductions
    ... collectives -> lockstep -> weighting -> reducer
    ... collectives -> sync_batchnorm
    ... replicas, fingerprint, training_state -> divergence
    config -> compiled
    network -> collectives
    meeting_point -> invitation -> rendezvous
    process_group
    failure, whereabouts, connections, peers -> side_channel -> neighbours, stalls, termination -> watch
"""
