"""Callbacks for training on many ranks. Lightning is known only in `lightning_callbacks` and its twin."""
