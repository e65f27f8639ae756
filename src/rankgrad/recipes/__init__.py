"""Every row of the papers' tables as a typed value with the published numbers beside it, and what runs one."""
