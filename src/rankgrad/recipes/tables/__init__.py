"""The rows, one file per paper, and a file of our own."""
