"""Fixtures of all collected tests."""

from __future__ import annotations

from tests.conftest import UNKNOWN_FIXTURES


def test_every_test_finds_its_fixtures() -> None:
    """A renamed fixture breaks its slow tests without notice, because they run seldom."""
    assert not UNKNOWN_FIXTURES
