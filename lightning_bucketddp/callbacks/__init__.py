"""Callbacks for training on many ranks. Lightning is known only in `lightning_callbacks` and its twin.

One noun per file, and a file imports only files to its left:

    global_batch, effective_rates -> scale_learning_rate -> lightning_callbacks, pytorch_lightning_callbacks
    global_batch -> scaling_monitor -> lightning_callbacks, pytorch_lightning_callbacks
    monitor -> lightning_callbacks, pytorch_lightning_callbacks
"""
