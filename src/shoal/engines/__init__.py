"""Adapters to where processes run. Each turns commands into what its engine understands."""
