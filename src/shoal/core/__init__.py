"""The pure heart: `step` decides, `apply` changes state, `check` states what must always hold."""
