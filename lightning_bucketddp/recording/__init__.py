"""What a run has written down about its steps, and what that tells."""
