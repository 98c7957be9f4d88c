"""Whether other programs load a folder: a module per program, with a rule for each thing that it reads."""
