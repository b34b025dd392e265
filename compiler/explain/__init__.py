"""Inspection of what the compiler does to a model: graphs, MLIR, drawings, errors."""
