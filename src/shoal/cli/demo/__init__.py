"""The parts of `shoal demo`: its plan, its work, what happened, and how it is shown."""
