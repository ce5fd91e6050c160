"""The Hugging Face engine. torch and transformers are imported here and nowhere else."""
