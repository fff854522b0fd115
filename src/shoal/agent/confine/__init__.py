"""Members of tenants that are kept apart: their Unix user, their mounts, their own folders."""
