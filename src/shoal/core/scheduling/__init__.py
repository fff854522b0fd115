"""The scheduler: in which order jobs are tried, and where their gangs fit."""
