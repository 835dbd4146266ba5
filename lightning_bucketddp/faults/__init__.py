"""Noticing that a rank has failed, died or is stuck, or that a signal has come, and ending the run on all ranks."""
