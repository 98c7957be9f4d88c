"""dsv4: the command-line toolkit for DeepSeek-V4."""

__version__ = "0.1.0"
