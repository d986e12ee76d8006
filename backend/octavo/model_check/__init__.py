"""What serving a model would take, said before any weight is downloaded or read."""
