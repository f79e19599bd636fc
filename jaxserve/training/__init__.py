"""Training of draft models: text to train on, features of the target, losses, and the loop."""
