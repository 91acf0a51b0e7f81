"""Any history of inserts, matches, locks, transfers and evictions agrees with a plain model."""

import pytest

from tests.dataplane.host_machine import SETS, drive


@pytest.mark.parametrize("pool_set", SETS)
def test_short_histories_agree_with_the_model(pool_set):
    drive(pool_set, examples=25, steps=30)
