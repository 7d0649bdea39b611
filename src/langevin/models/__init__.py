"""Models: other people's with our mixers (`convert`), and drift folded away (`fold`)."""
