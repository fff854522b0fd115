"""Features: each adds its phase, its reasons and its checks to the step, in one place."""
