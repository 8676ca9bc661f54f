"""The long-context adapter: its training data, training, evaluation and export.

    python -m experiments.longcontext train|evaluate|export [KEY=VALUE ...]

README.md beside this file says how the published adapter was made.
"""
