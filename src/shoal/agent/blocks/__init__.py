"""Blocks of files that nodes fetch from each other, verified by their hashes."""
