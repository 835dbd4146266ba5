"""Atomic checkpoint files, integrity, safe loading, saving in the background."""
