"""What a run did: records of its steps, and what is made of them for people to look at."""
