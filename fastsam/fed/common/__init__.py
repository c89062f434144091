"""What every room of the federated loop uses: checks of arguments, seeds, fingerprints, import paths, files replaced in
one step."""
