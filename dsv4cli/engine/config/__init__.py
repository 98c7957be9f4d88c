"""What are the model's dimensions, in whichever words they are written? No torch."""
