"""Tracing: find where two computations of the same tokens diverge by more than rounding explains."""
