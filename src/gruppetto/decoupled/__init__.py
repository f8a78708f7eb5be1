"""Decoupled backpropagation: a network in K modules that run backward without waiting."""
