"""The checker of recorded histories."""
