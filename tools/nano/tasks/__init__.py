"""Nano's tasks. Each is a function (rng, split) -> Item."""
