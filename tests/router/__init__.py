"""The token router."""
