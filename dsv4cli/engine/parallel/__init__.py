"""Tensor-parallel ranks: how they start, communicate and end."""
