"""What experimenters do with federated runs: config files, the command line, comparisons, reports, plots, the papers'
tables."""
