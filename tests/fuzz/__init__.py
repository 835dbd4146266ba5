"""Draws programs that a user might write, and looks for those that `bucketddp` trains differently."""
