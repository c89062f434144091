"""Attacks on the promises of `docs/about_reliability.md`: `make attack MINUTES=10`, or one of them with
`python -m tests.attack --only NAME`.

`trials` says what an attack is, `plan` lists all of them, `report` writes the page's figures. The other modules hold
the attacks, a room each.
"""
