"""Would another program load this folder: one file a program, a rule for each thing that it reads."""
