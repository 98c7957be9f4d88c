"""Nano: its data, its training and its scores; every part runs as `python -m tools.nano.<part>`."""
