"""Sentence encoders trained on intents: the parts of `python -m benchmarks.text_study`."""
