"""Attacks on a running cluster: races, strangers, hostile connections, sick disks, damaged files."""
