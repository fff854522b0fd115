"""The cluster as the controller knows it: facts, indexes, what was heard, and `apply`."""
