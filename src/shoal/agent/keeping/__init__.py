"""Folders of jobs that are kept at the head, so that they outlive the node."""
