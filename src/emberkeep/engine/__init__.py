"""Step engines: llama.cpp, and a deterministic fake that runs most tests."""
