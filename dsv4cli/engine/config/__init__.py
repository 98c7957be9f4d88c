"""Model configuration in every dialect; no torch."""
