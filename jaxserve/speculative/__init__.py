"""Speculative decoding: drafts of the next tokens, and how the target accepts them."""
