"""Studies that produce published results."""
