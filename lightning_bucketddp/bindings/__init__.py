"""The classes for each root of Lightning: the only folder that imports Lightning."""
