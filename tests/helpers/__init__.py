"""Code that several test modules share: cases, oracles, tolerances, doubles, programs that tests run."""
