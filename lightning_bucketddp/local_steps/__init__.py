"""Steps that ranks take without most others, and the averages of their weights in between."""
