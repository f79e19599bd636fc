"""Fences between the scheduler's writes and the programs' reads: thin Python over ``csrc/``."""
