"""Nodes on other machines, whose agents dial the head."""
