"""The embedded engine: every node is one agent process on this machine."""
