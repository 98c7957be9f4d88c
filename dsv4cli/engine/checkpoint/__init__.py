"""What is stored, under which name, in which format, cut how? No torch."""
