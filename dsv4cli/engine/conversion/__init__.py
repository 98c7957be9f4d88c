"""Rewrites a checkpoint in another layout: what is selected, what is written beside the weights, and how."""
