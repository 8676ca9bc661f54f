"""Joining attention over disjoint sets of keys by log-sum-exp."""
