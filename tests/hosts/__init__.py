"""Hosts over ssh."""
