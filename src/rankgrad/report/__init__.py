"""Run folders as one HTML page that opens offline, and the pictures that explain the losses."""
