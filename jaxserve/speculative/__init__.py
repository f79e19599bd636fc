"""Speculative decoding: who drafts tokens, and how many are worth verifying."""
