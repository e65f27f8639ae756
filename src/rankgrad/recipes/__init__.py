"""Every row of the papers' tables as a typed value with its published numbers."""
