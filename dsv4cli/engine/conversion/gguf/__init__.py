"""GGUF files as a target of `dsv4 convert`: their plan, their metadata, their blocks."""
