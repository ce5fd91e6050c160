"""The command line: parse, print, nothing else."""
