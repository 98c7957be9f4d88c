"""Checkpoints: tensor names, storage formats, layouts and sharding; no torch."""
