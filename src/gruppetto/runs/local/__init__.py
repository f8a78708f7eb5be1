"""A run with real processes: what each process does, and the caller's side of it."""
