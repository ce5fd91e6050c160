"""What is remembered: archived turns, stored answers, facts, saved conversations; one SQLite file, searchable."""
