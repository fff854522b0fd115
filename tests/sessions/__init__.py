"""Sessions, without processes."""
