"""Samples that come batch by batch: who trains them."""

from __future__ import annotations

import pytest

from tests.helpers.fed_kinds import Rows, in_another_collate, pairs, run


def test_auto_never_stacks_batches_and_vmap_refuses_them() -> None:
    clients = [Rows(x, y) for x, y in pairs()]
    assert run(clients).summary()["executor"] == "vmap"
    assert run(clients, collate=in_another_collate).summary()["executor"] in ("threads", "sequential")
    with pytest.raises(ValueError, match="'vmap' cannot serve here: .*batch by batch"):
        run(clients, collate=in_another_collate, executor="vmap")
