"""The agent with real processes, and a test in the controller's place."""
