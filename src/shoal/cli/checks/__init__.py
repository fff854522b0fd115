"""What `shoal check` does besides checking single nodes."""
