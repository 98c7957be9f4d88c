"""Profiling: how long single operations (`kernels`) and whole steps (`step`) take on this machine."""
