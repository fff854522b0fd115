"""The calls of the API, each declared once; routes, clients and the reference follow."""
