"""How each family of mechanisms is computed. Kernels know views and tensors, never mixers."""
