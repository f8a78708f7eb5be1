"""Runs: configuration -> engine -> trace; resume, replay, compare, export."""
