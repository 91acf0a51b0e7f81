"""Everything the control plane can be told, in one typed class: flags, `CAKETIN_*` variables, or a file."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class StoreSettings(BaseSettings):
    """Which store the data planes use; told to every rank that registers."""

    model_config = SettingsConfigDict(env_prefix="CAKETIN_STORE_", extra="forbid")

    kind: Literal["mooncake", "file"] = Field("file", description="mooncake, or file for one machine")
    path: str = Field("", description="file: folder of the store")
    master: str = Field("", description="mooncake: host:port of mooncake_master")
    metadata: str = Field("P2PHANDSHAKE", description="mooncake: metadata server, or P2PHANDSHAKE")
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="mooncake: transport")
    devices: str = Field("", description="mooncake: RDMA devices, comma separated; empty chooses")

    @model_validator(mode="after")
    def _names_its_place(self) -> StoreSettings:
        if self.kind == "mooncake" and not self.master:
            raise ValueError("store master: set CAKETIN_STORE_MASTER to host:port of mooncake_master")
        if self.kind == "file" and not self.path:
            raise ValueError("store path: set CAKETIN_STORE_PATH to the folder of the file store")
        return self


class Settings(BaseSettings):
    """Settings of one control-plane process."""

    model_config = SettingsConfigDict(env_prefix="CAKETIN_", extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on; loopback only, until tokens exist")
    port: int = Field(7411, ge=0, le=65_535, description="port to listen on")
    redis_url: SecretStr = Field(SecretStr("redis://127.0.0.1:6379/0"), description="where Redis is")
    redis_connect_seconds: float = Field(0.5, gt=0, description="deadline of a connection to Redis")
    redis_command_seconds: float = Field(1.0, gt=0, description="deadline of a Redis command")
    lease_seconds: int = Field(30, ge=1, description="a rank without a heartbeat for so long is gone")
    companion_seconds: int = Field(3600, ge=1, description="life of an incomplete page's shard bitmaps")
    note_seconds: int = Field(3600, ge=1, description="how long a miss can be explained")
    flush_seconds: float = Field(1.0, gt=0, description="how often hit counters go to Redis")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="largest request body")
    body_seconds: float = Field(10.0, gt=0, description="deadline of a request body")
    store: StoreSettings = Field(default_factory=StoreSettings)  # reads its own variables

    @model_validator(mode="after")
    def _stays_on_loopback(self) -> Settings:
        if self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback:
            return self
        raise ValueError(
            f"host {self.host!r} is reachable from elsewhere and nothing asks callers who they are: "
            "use 127.0.0.1 or ::1"
        )
