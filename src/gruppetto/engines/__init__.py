"""The only code that knows time and processes."""
