"""Bare servers made into nodes, over ssh: `shoal up --hosts`."""
