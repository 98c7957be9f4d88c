"""How does a message get its answer?"""
