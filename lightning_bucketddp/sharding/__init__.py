"""Optimizer state divided among the ranks: a wing above the reducer."""
