"""Rewrites a checkpoint in another layout or precision."""
