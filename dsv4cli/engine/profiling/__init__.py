"""How long the model's parts take on this machine: single operations (`kernels`) and whole steps (`step`)."""
