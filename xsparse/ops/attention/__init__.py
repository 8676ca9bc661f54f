"""Attention inside a mask of blocks, dense attention, and exact attention mass per block."""
