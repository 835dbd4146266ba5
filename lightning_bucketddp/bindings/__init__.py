"""What is used with one root of Lightning: the only folder that imports Lightning at run time."""
