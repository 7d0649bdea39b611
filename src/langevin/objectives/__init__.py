"""What a model is asked to learn: the loss of a batch, one file an objective."""
