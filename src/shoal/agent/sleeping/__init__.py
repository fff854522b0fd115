"""Members fall asleep and wake: the port (`port`), and its two ways (`freeze`, `cuda`)."""
