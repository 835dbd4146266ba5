"""The strategies for the Trainer and for Fabric, which Lightning calls."""
