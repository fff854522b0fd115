"""Where the parts of a head are wired together: the leader, and the standby before it leads."""
