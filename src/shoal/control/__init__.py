"""The live control plane: the loop that steps, what it stores, and where its files are."""
