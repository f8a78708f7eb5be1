"""Runs of decoupled backpropagation: settings -> parts -> engine -> trace, resume, replay."""
