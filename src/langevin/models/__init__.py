"""Models: other people's, converted (`convert`)."""
