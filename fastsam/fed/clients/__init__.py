"""The clients of a run and their data, and the sampling of cohorts."""
