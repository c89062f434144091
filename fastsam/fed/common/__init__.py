"""Helpers of the federated loop: checks of arguments, seeds, fingerprints, import paths, atomic files."""
