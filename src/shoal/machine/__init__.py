"""What this machine gives us: processes, control groups, sockets, and files that must be whole."""
