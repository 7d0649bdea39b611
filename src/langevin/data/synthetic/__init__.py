"""Seeded generators of text whose true distribution is known."""
