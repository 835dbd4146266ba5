"""Monitor, learning rate, scaling, batch size finder, less their base class."""
