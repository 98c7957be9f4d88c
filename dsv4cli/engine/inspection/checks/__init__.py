"""What the values of a checkpoint say: statistics of every tensor, and what cannot be right; numpy, no torch."""
