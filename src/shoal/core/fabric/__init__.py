"""Pure conclusions from measured links: which are weak, and which nodes are near each other."""
