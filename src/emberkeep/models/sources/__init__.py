"""Where models come from. Each source puts one file into a folder; none of them knows the library."""
