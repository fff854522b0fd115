"""Attacks on a running cluster: races, strangers, slow connections, sick disks, damaged files."""
