"""Trained models as files that run elsewhere."""
