"""Nano's tasks: each is a function (rng, split) -> Item."""
