"""The papers' pictures, computed with this library: a module for each, one look for all, and the command that draws them."""
