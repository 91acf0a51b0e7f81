"""One line of text names the devices of every process: by rank, by NUMA node, or for all."""

import pytest

from dataplane.rdma_devices import NoDeviceForRank, chosen_devices, devices_by_selector
from metadata.errors import InvalidInput

RANK = "dp1-pp0-cp0-tp3"


@pytest.mark.parametrize("text", ["", " ", "auto", " auto ", "*=auto", "tp3=auto; *=mlx5_0"])
def test_nothing_or_auto_leaves_the_choice_to_mooncake(text: str):
    assert chosen_devices(text, RANK) == ()


@pytest.mark.parametrize(
    "text", ["mlx5_0,mlx5_1", " mlx5_0 , mlx5_1,", "*=mlx5_0,mlx5_1", ";*= mlx5_0, mlx5_1 ;"]
)
def test_a_plain_list_is_for_everybody(text: str):
    assert chosen_devices(text, RANK) == ("mlx5_0", "mlx5_1")
    assert chosen_devices(text) == ("mlx5_0", "mlx5_1")


BY_RANK = "dp0-tp3=a; dp1-pp0-cp0-tp3=b; tp2=c; numa1=d; *=e"


@pytest.mark.parametrize(
    ("rank", "node", "device"),
    [
        (RANK, 1, "b"),
        ("dp0-pp0-cp0-tp3", None, "a"),
        ("dp7-pp0-cp0-tp2", 1, "c"),
        ("dp7-pp0-cp0-tp20", None, "e"),
        ("dp0-pp0-cp0-tp33", 1, "d"),
        ("", 1, "d"),
        ("", 11, "e"),
        ("", None, "e"),
    ],
)
def test_the_first_entry_that_fits_counts(rank: str, node: int | None, device: str):
    assert chosen_devices(BY_RANK, rank, node) == (device,)


def test_a_process_that_no_entry_fits_is_told_so():
    with pytest.raises(NoDeviceForRank) as said:
        chosen_devices("tp0=mlx5_0", RANK, 1)
    assert said.value.errors[0].field == "devices"
    assert "rank 'dp1-pp0-cp0-tp3', on NUMA node 1" in said.value.errors[0].detail
    with pytest.raises(NoDeviceForRank, match="a process without a rank, bound to no NUMA node"):
        chosen_devices("tp0=mlx5_0")


@pytest.mark.parametrize(
    "text",
    [
        *("mlx5_0;mlx5_1", "mlx5 0", "../x", "auto,mlx5_0", "=mlx5_0", "tp0=mlx5_0;mlx5_1", "tp=mlx5_0"),
        *("numa=mlx5_0", "tp0=a=b", "TP0=a"),
    ],
)
def test_what_cannot_be_read_is_refused_whoever_asks(text: str):
    with pytest.raises(InvalidInput) as said:
        devices_by_selector(text)
    assert [e.field for e in said.value.errors] == ["devices"]
