"""How the ranks of a run find each other."""
