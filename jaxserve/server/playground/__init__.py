"""The page at ``/``: chat, tokens, and the steps as they happen."""
