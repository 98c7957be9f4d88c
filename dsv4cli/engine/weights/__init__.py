"""Loading weights: filling parameters, and placing them in GPU and host memory."""
