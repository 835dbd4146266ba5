"""What Lightning asks of a strategy, on top of `core`.

    registration -> binding
    uneven_data, skipped_step -> participation
    participation, shared_buffers, synced_layers -> training
    rank_seeds -> saving
    options, binding, training, saving -> trainer -> trainer_lightning, trainer_pytorch_lightning
    options, binding                   -> fabric  -> fabric_lightning,  fabric_lightning_fabric

`registration` imports the last of each only when its root of Lightning is in use.

The logic is written once, without Lightning imports, and bound to each of Lightning's roots in a few lines: the roots
define separate classes and accept only their own.
"""
