"""From logits to tokens: masks, sampling, log-probabilities."""
