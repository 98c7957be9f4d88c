"""The Hugging Face hub: which files a repository holds, fetching them whole and verified, reading headers from afar.

huggingface_hub does what it can: its cache, tokens, variables, xet and offline mode are used as they are. Since
version 1 it throws an unfinished file away, checks no hash of a plain download and never asks whether a repository
fits on the disk: that is what this package adds.
"""
