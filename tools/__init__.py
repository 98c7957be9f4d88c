"""The tools of the project that are not part of the package."""
