"""One file per verb of the command line, each imported only when that verb runs."""
