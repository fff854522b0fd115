"""Answers to people's questions, computed from the state and the log; nothing here decides."""
