"""Which tokens go through the model next, and which come out? Ids in, ids out, no text."""
