"""The verbs of the command line, a family in each file, imported only when one of them runs."""
