"""Training: a loop one can read, optimisers, and checkpoints that survive anything."""
