"""The engine: requests in, deltas out; blocking (``LLM``) and asynchronous (``AsyncEngine``)."""
