"""Findings of the FP4 papers that need no training, each a script: ``python -m benchmarks.findings.NAME``.

A script writes benchmarks/results/findings_NAME.json and docs/plots/NAME.png; docs/findings.md says what they show. The
arithmetic is the oracle's (``fp4.runtime.reference``) and the eager face's (``fp4.quantize``): a script only makes data and
measures.
"""
