"""The engine: decides which tokens go through the model next, and samples. Token ids in, token ids out, no text."""
