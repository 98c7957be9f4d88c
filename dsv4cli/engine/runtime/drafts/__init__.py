"""Speculative decoding: drafters, how many drafts to verify, and their verification."""
