"""Inspection of a model: its identity, whether it loads, its integrity and its size."""
