"""Callbacks for training on many ranks, less their Lightning base class."""
