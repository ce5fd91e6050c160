"""Pure values that travel between the layers: what is asked, what happens, what it cost."""
