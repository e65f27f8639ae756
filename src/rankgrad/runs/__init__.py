"""One pipeline for any task: start, resume, evaluate; the run folder."""
