"""Supply: nodes that are ordered, what becomes of the orders, and giving them back."""
