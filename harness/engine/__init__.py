"""A simulated engine of language models: a pure model on any clock, and its HTTP server."""
