"""What simulations are told: chance from a seed, and traces of how many devices are up."""
