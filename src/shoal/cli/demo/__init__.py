"""`shoal demo`: a small cluster that comes up, loses a node, heals, and leaves nothing behind."""
