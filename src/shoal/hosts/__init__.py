"""Turns bare servers into nodes over ssh: `shoal up --hosts`."""
