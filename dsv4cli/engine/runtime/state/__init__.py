"""What an engine keeps of sequences: KV cache, ring buffers, the prefix cache and its host-memory tier."""
