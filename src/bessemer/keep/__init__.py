"""Keep: what survives. Durable checkpoints, the vault process that writes them, and the agent that watches a run.

Nothing here imports torch on import of the package: the vault and the agent start without it.
"""
