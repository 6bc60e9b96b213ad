"""prime-rl: asynchronous reinforcement learning for language models."""
