"""Checks of a checkpoint's values: statistics of every tensor, and values that cannot be right; numpy, no torch."""
