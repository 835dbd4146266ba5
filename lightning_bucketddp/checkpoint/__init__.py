"""Checkpoints that are written whole by rank zero, read by all, and safe to load."""
