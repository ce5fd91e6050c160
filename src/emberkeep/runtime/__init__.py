"""The composition root: a Config becomes running objects."""
