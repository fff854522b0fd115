"""Notices: rules, the outbox, and real receivers."""
