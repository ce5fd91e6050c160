"""Step engines: llama.cpp, Hugging Face models, and a deterministic fake that runs most tests."""
