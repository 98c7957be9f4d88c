"""How do messages become text and ids, and back? No torch."""
