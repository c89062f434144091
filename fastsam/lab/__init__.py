"""Experiments with federated runs: config files, the command line, comparisons, reports, plots, the papers' tables."""
