"""Talking to other ranks: collectives, process groups, and the networks below them."""
