"""The endpoints, one file per family."""
