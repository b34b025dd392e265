"""The control: no rewrite. Every GEMM stays in the dtype the model gives it."""

from __future__ import annotations

from fp4.compiler.policy import Policy


def bf16() -> Policy:
    """No rewrite: the control."""
    return Policy("bf16")
