"""The parts of `shoal install-service`: units of systemd, what needs one here, and systemctl."""
