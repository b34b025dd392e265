"""From torch.compile to a rewritten graph: backend, sites, policy, pipeline, verification, report."""
