"""The phases of a step, in the order in which `core.step` calls them, and what they share."""
