"""Where models come from. Each source puts a model's files into a folder; none of them knows the library."""
