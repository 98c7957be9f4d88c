"""How do parameters get their values, and where do they lie?"""
