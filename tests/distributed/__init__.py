"""Several processes on one machine, over gloo."""
