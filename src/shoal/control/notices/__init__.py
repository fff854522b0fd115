"""Sends notices: an outbox on disk, and senders outside of the loop."""
