"""The commands: each checks its options, makes one engine call and reports."""
