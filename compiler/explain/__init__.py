"""Inspection of what the compiler does to a model: graphs, drawings, errors."""
