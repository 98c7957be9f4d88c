"""Development tools of the project. They are not part of the package."""
