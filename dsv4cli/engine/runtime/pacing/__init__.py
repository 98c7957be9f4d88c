"""Scheduling policy: how much prefill a step does next to requests that decode."""
