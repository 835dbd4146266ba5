"""Rank-zero checkpoint I/O. Knows torch and fsspec; Lightning only in `lightning_io` and `lightning_fabric_io`.

One noun per file, and a file imports only files to its left:

    outline -> damage -> neighbours -> reading
    errors, harmless -> reading
    errors, leftovers -> atomic_file, reading -> atomic_io -> lightning_io, lightning_fabric_io
    errors, snapshot, stats -> writer
    errors -> rank_zero -> background
    errors -> every_rank
    errors -> finite_weights
    plain_data, per_rank -> hook_state
"""
