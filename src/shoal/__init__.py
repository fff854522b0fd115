"""Shoal turns the machines you have into one AI cluster."""

__version__ = "0.1.0"
