"""Checkpoints: Hugging Face folders and GGUF files, to model parameters on the device."""
