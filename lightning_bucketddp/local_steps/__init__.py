"""Islands of ranks, and the outer step that averages their weights."""
