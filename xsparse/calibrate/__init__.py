"""Thresholds per head, calibrated on the true attention of a model (docs/selectors.md).

One threshold for all heads is too low for some and too high for others. Here each layer and query
head gets the least threshold with which XAttention's rule keeps the blocks that hold `coverage` of
the head's true attention mass, on prompts that no evaluation uses.
"""
