"""Backups: one file from which a cluster can be brought back (docs/backup.md, ADR 57)."""
