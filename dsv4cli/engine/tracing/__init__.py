"""Where do two computations of the same tokens part, and by more than rounding explains?"""
