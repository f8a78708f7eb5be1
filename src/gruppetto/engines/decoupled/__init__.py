"""Engines of decoupled backpropagation: all modules in one process, or each in its own.

Both run the programs of :mod:`gruppetto.decoupled.schedule`. What a module computes depends on its
column alone, so their weights are equal to the bit.
"""
