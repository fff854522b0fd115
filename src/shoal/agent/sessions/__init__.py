"""Sessions: users who enter running members (docs/into-a-job.md, ADR 48)."""
