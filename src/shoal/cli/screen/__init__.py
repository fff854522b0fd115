"""What the command line shows: tables, sentences, live screens."""
