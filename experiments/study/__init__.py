"""A published study: small tables that can be committed, and every figure made from them alone.

    python -m experiments.study collect RESULTS --out DIR
    python -m experiments.study figures DIR

`collect` reduces a results folder of run.py to tables, `figures` needs nothing but the tables.
"""
