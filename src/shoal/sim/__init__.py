"""A world on virtual time that drives the very step of the live controller."""
