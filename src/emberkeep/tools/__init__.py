"""What a model can do besides talking."""
