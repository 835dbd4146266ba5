"""Monitor, learning rate, scaling, batch size finder, without their base class."""
