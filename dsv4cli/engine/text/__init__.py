"""Conversion of messages to prompt text and token ids, and of generated text to messages. Does not import torch."""
