"""HTTP over the control loop: thin handlers, one file per concern."""
