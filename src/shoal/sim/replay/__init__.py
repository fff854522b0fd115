"""Replays: a trace or a cluster's own history under other policies, on virtual time."""
