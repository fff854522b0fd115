"""The pure heart: `step` decides, `apply` changes state, `verify` states what must always hold."""
