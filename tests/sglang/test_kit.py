"""SGLang's own L3 test kit: what passes with its backend `file` passes with caketin, for its every pool set.

Each test plays a scenario over `file` first. Where that does not pass, here and now, caketin owes nothing.
"""

from __future__ import annotations

import hashlib
import unittest

import pytest

from tests.sglang.kit import KIT_CONFIGS, SCENARIOS, Kit, what_is_produced_is_consumed

pytestmark = pytest.mark.sglang

OVER_MOONCAKE = ("FULL_ps64", "FULL_MAMBA_ps64", "FULL_SWA_ps64_sw64", "FULL_SWA_ps1_sw4")
"""One pool set of each sort and a window of several pages; the file store has them all."""

CASES = [
    pytest.param(label, scenario, id=f"{label}-{scenario.__name__}")
    for label, config in KIT_CONFIGS.items()
    for scenario, has in SCENARIOS.items()
    if has(config)
]


def over(plane):
    """Return what makes an extra config: engines of one folder of the kit share, others do not."""

    def extra(folder: str) -> dict:
        return plane.extra(model=f"kit-{hashlib.sha256(folder.encode()).hexdigest()[:16]}")

    return extra


def passes_with_file(label, scenario) -> None:
    try:
        Kit(KIT_CONFIGS[label]).play(scenario)
    except unittest.SkipTest as reason:
        pytest.skip(f"the kit: {reason}")
    except AssertionError as reason:
        pytest.skip(f"does not pass with `file` here: {reason}")


@pytest.mark.parametrize(("label", "scenario"), CASES)
def test_what_passes_with_file_passes_with_caketin(file_plane, label, scenario):
    passes_with_file(label, scenario)
    Kit(KIT_CONFIGS[label], over(file_plane)).play(scenario)


@pytest.mark.parametrize(("label", "scenario"), [c for c in CASES if c.values[0] in OVER_MOONCAKE])
def test_and_over_mooncake(mooncake_plane, label, scenario):
    Kit(KIT_CONFIGS[label], over(mooncake_plane)).play(scenario)


@pytest.mark.parametrize("label", OVER_MOONCAKE)
def test_the_kit_passes_with_file_and_caketin_smoke(file_plane, label):
    Kit(KIT_CONFIGS[label]).play(what_is_produced_is_consumed)
    Kit(KIT_CONFIGS[label], over(file_plane)).play(what_is_produced_is_consumed)


def test_every_scenario_has_a_pool_set_that_passes_with_file():
    """A scenario that was skipped everywhere would demand nothing."""
    sets = {s: [c for c in KIT_CONFIGS.values() if has(c)] for s, has in SCENARIOS.items()}
    for scenario, configs in sets.items():
        Kit(configs[-1]).play(scenario)
