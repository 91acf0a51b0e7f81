"""The RDMA flags that several commands have, with one name and one meaning."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import typer

from dataplane.rdma_settings import RdmaSettings
from metadata.errors import FieldError, InvalidInput

Protocol: TypeAlias = Annotated[Literal["tcp", "rdma"], typer.Option(help="how Mooncake moves bytes")]
RdmaDevices: TypeAlias = Annotated[
    str, typer.Option(help="RDMA devices: mlx5_0,mlx5_1; tp0=mlx5_0;tp1=mlx5_1; numa0=mlx5_0; auto")
]
GidIndex: TypeAlias = Annotated[int | None, typer.Option(help="RoCE: row of the port's GID table")]
TrafficClass: TypeAlias = Annotated[int | None, typer.Option(help="RoCE: DSCP * 4, 0 to 255")]
ServiceLevel: TypeAlias = Annotated[int | None, typer.Option(help="InfiniBand: service level, 0 to 15")]
Mtu: TypeAlias = Annotated[
    int | None, typer.Option(help="512, 1024, 2048 or 4096; the same on storage nodes and engines")
]


def rdma_settings(protocol: str, devices: str, *numbers: int | None) -> RdmaSettings | None:
    """Return what the flags say of RDMA, None for TCP; `numbers` in the order of the flags above.

    Raises:
        InvalidInput: a value cannot be used, or belongs to a protocol that is not asked for.
    """
    if protocol == "rdma":
        return RdmaSettings(devices, *numbers)
    if devices or any(number is not None for number in numbers):
        detail = "is tcp, which has no devices, GIDs and the like: give --protocol rdma"
        raise InvalidInput("RDMA is not asked for", [FieldError("--protocol", "mismatch", detail)])
    return None
