"""Shoal for Python programs: `shoal.Client`, `shoal.AsyncClient`, `shoal.run` (docs/python.md)."""
