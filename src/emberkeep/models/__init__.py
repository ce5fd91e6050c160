"""Model files on this machine: what they are, where they are kept, how they get here."""
