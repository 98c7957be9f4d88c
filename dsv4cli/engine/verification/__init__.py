"""Checks of a running server against the official encoder, the reply format and its own answers. No torch."""
