"""What Lightning calls: the strategies for the Trainer and for Fabric."""
