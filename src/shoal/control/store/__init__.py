"""The store: the log of events, snapshots and finished jobs in SQLite."""
