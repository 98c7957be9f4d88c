"""GGUF as a target of `dsv4 convert`: plan, metadata and blocks."""
