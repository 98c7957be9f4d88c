"""Does a model fit: the devices there are, the bytes it takes on each, the answer and what to do with it."""
