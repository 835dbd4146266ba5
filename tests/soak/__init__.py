"""Real training programs that meet random faults at random times, again and again: `python -m tests.soak --help`."""
