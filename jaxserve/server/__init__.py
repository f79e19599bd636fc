"""HTTP: the OpenAI-compatible API, its wire types, streaming, health and metrics. Knows the engine only by protocol."""
