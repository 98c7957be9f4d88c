"""How good is a model, and is it as good as another?"""
