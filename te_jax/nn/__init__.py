"""What the Linen and NNX modules share: the arithmetic and the state of layers, without a module system."""
