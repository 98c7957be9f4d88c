"""Ahead-of-time kernel compilation: predict which kernels a run launches, and compile them before it does."""
