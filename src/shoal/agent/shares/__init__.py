"""A share of a GPU is enforced: by the driver, by the program itself, and by looking."""
