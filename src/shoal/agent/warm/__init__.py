"""Warm starts: members forked from an interpreter that holds their imports already."""
