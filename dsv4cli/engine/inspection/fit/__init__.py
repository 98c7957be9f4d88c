"""Whether a model fits: the available devices, the bytes needed on each, the answer and advice."""
