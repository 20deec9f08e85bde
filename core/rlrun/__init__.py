"""rlrun: reinforcement-learning post-training of language models, a minimal core plus plugins."""

__version__ = "0.1.0"
