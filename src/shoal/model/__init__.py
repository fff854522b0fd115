"""The nouns of Shoal as plain data: no I/O, no clock, no behavior beyond arithmetic."""
