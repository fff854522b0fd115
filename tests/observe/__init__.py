"""Tests of what an operator sees: curves, metrics, the terminal, failures told."""
