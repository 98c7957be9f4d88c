"""How does a program ask over HTTP, and what does it get?"""
