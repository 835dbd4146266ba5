"""The reducer and its parts. Knows torch, never Lightning.

One noun per file, and a file imports only files to its left:

    config -> plan -> bucket -> collectives -> wire -> stats -> reducer -> replicas, sync_batchnorm
"""
