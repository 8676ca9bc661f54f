"""From block scores to a mask: keep the best blocks until their mass reaches a share (top-p)."""
