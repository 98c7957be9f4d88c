"""The model and everything around it; no typer, no terminal, no environment."""
