"""Books: what is counted and learned, with its formulas. They know neither the state nor a step."""
