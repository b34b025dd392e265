"""What a rewritten graph calls: number formats, the oracle, random draws, layouts, the ``fp4::`` ops. Imports no Triton."""
