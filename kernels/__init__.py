"""Generated Triton kernels. Nothing imports this package until a kernel is needed."""
