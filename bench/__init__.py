"""Programs that measure Shoal, most of them beside its peers."""
