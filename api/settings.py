"""Everything the control plane can be told, in one typed class: flags, `CAKETIN_*` variables, or a file.

A flag wins over a variable, a variable over the file, the file over the default.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from api.logs import MASK, LogFormat, LogLevel
from metadata.errors import FieldError, InvalidInput
from metadata.redis_url import parse_redis_url

ENV_PREFIX: Final = "CAKETIN_"
_FILE: ContextVar[Mapping[str, Any] | None] = ContextVar("settings_file", default=None)
_USER_INFO: Final = re.compile(r"(?<=://)[^/@]*(?=@)")


class StoreSettings(BaseModel):
    """Which store the data planes use; told to every rank that registers."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["mooncake", "file"] = Field("file", description="mooncake, or file for one machine")
    path: str = Field("", description="file: folder of the store")
    max_bytes: int = Field(0, ge=0, description="file: size bound of the folder in bytes; 0 for none")
    master: str = Field("", description="mooncake: host:port of mooncake_master")
    metadata: str = Field("P2PHANDSHAKE", description="mooncake: metadata server, or P2PHANDSHAKE")
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="mooncake: transport")
    devices: str = Field("", description="mooncake: RDMA devices, comma separated; empty chooses")

    @model_validator(mode="after")
    def _names_its_place(self) -> StoreSettings:
        if self.kind == "mooncake" and not self.master:
            raise ValueError(f"host:port of mooncake_master is needed: {spellings('store.master')}")
        if self.kind == "file" and not self.path:
            raise ValueError(f"the folder of the file store is needed: {spellings('store.path')}")
        return self


class Settings(BaseSettings):
    """Settings of one control plane."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="_", env_nested_max_split=1, extra="forbid"
    )

    host: str = Field(
        "127.0.0.1", description="address to listen on; loopback only, unless there is a token file"
    )
    port: int = Field(7411, ge=0, le=65_535, description="port to listen on; 0 takes a free one")
    workers: int = Field(1, ge=1, le=64, description="processes that serve")
    token_file: str = Field("", description="who may call: hashed access tokens; empty: this machine only")
    tls_cert: str = Field("", description="certificate chain (PEM), to serve HTTPS")
    tls_key: str = Field("", description="private key of the certificate (PEM)")
    redis_url: SecretStr = Field(SecretStr("redis://127.0.0.1:6379/0"), description="where Redis is")
    redis_connect_seconds: float = Field(0.5, gt=0, description="deadline of a connection to Redis")
    redis_command_seconds: float = Field(1.0, gt=0, description="deadline of a Redis command")
    redis_failures_to_open: int = Field(
        3, ge=1, description="failures in a row after which a Redis node is not asked any more"
    )
    redis_probe_seconds: float = Field(
        0.5, gt=0, description="how often a Redis node that is not asked is looked at again"
    )
    lease_seconds: int = Field(30, ge=1, description="a rank without a heartbeat for so long is gone")
    companion_seconds: int = Field(3600, ge=1, description="life of an incomplete page's shard bitmaps")
    note_seconds: int = Field(3600, ge=1, description="how long a miss can be explained")
    negative_seconds: float = Field(
        5.0, ge=0, description="how long a page whose read timed out is not claimed again; 0: not at all"
    )
    flush_seconds: float = Field(1.0, gt=0, description="how often hit counters go to Redis")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="largest request body")
    max_header_bytes: int = Field(64 << 10, ge=1024, description="largest request head")
    header_seconds: float = Field(5.0, gt=0, description="deadline of a request's head")
    body_seconds: float = Field(10.0, gt=0, description="deadline of a request's body")
    idle_seconds: float = Field(30.0, gt=0, description="how long a connection may be idle")
    max_connections: int = Field(4096, ge=1, description="connections of a process; more are turned away")
    max_calls_at_once: int = Field(1024, ge=1, description="calls that a process answers at the same time")
    calls_per_second: float = Field(2000, ge=0, description="of one token in a process; 0 does not limit")
    calls_burst: int = Field(4000, ge=1, description="calls that a token may make at once after a pause")
    tenant_max_pages: int = Field(0, ge=0, description="pages that a tenant may claim; 0 does not limit")
    tenant_max_bytes: int = Field(0, ge=0, description="bytes that a tenant may claim; 0 does not limit")
    shutdown_seconds: float = Field(5.0, gt=0, description="how long requests may take to end at shutdown")
    log_format: LogFormat = Field("json", description="json, or console for a terminal")
    log_level: LogLevel = Field("info", description="debug, info, warning, or error")
    log_requests: bool = Field(False, description="a log line for every request, not only for refused ones")
    store: Annotated[StoreSettings, Field(default_factory=lambda: StoreSettings.model_validate({}))]

    @model_validator(mode="after")
    def _stays_on_loopback(self) -> Settings:
        if self.on_loopback or self.token_file:
            return self
        raise ValueError(
            f"host {self.host!r} is reachable from elsewhere and nothing asks callers who they are: "
            f"use 127.0.0.1 or ::1 for {spellings('host')}; or give {spellings('token_file')}"
        )

    @field_validator("redis_url")
    @classmethod
    def _reads_the_redis_url(cls, value: SecretStr) -> SecretStr:
        try:
            parse_redis_url(value.get_secret_value())
        except InvalidInput as error:
            raise ValueError(f"{error.errors[0].detail} ({spellings('redis_url')})") from None
        return value

    @model_validator(mode="after")
    def _has_both_halves_of_tls(self) -> Settings:
        if bool(self.tls_cert) == bool(self.tls_key):
            return self
        there, other = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
        raise ValueError(f"{there} is given without its other half: {spellings(other)}")

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: what is given in code or by flags, then variables, then the file."""
        return init_settings, env_settings, InitSettingsSource(settings_cls, dict(_FILE.get() or {}))

    @classmethod
    def load(cls, flags: Mapping[str, str] | None = None, file: Path | None = None) -> Settings:
        """Return the effective settings.

        Args:
            flags: what the command line gives, by name (`redis_url`, `store.path`), as text.
            file: a TOML file, or None.

        Raises:
            InvalidInput: a value cannot be used; `errors` names each setting, `detail` all its spellings.
        """
        given: dict[str, Any] = {}
        for name, value in (flags or {}).items():
            outer, _, inner = name.rpartition(".")
            (given.setdefault(outer, {}) if outer else given)[inner] = value
        token = _FILE.set(_read(file) if file is not None else {})
        try:
            return cls(**given)
        except ValidationError as error:
            found = [_field_error(dict(e)) for e in error.errors(include_url=False, include_input=False)]
            raise InvalidInput("the settings cannot be used", found) from None
        finally:
            _FILE.reset(token)

    def secrets(self) -> list[str]:
        """Return what must not appear in a log: passwords and the URLs that hold them."""
        url = self.redis_url.get_secret_value()
        info = _USER_INFO.search(url)
        password = info[0].partition(":")[2] if info else ""
        return [text for text in (password, url if password else "") if text]

    def shown(self) -> dict[str, str]:
        """Return every setting by name as text, secrets masked."""
        return {name: _shown(_value(self, name)) for name, _ in setting_fields()}


def setting_fields(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Give every setting's dotted name and field, nested ones as `store.path`."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_fields(field.annotation, f"{name}.")
        else:
            yield prefix + name, field


def flag_of(name: str) -> str:
    """Return a setting's flag."""
    return "--" + name.replace(".", "-").replace("_", "-")


def variable_of(name: str) -> str:
    """Return a setting's environment variable."""
    return ENV_PREFIX + name.replace(".", "_").upper()


def spellings(name: str) -> str:
    """Return how a setting is given, in all three ways."""
    return f"{flag_of(name)}, {variable_of(name)}, or {name} in the file"


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = f"is not TOML: {error}"
    detail = f"{file}: {reason} (--config or {ENV_PREFIX}CONFIG)"
    raise InvalidInput("the settings cannot be used", [FieldError("config", "unreadable", detail)])


def _field_error(found: dict[str, Any]) -> FieldError:
    name = ".".join(str(step) for step in found["loc"])
    message = str(found["msg"]).removeprefix("Value error, ")
    if found["type"] == "value_error":  # a rule over several settings; the text names them
        return FieldError(name or "settings", "invalid", message)
    if found["type"] == "extra_forbidden":
        return FieldError(name, "unknown_setting", "there is no such setting")
    return FieldError(name, "invalid", f"{message} ({spellings(name)})")


def _value(settings: BaseModel, name: str) -> object:
    value: object = settings
    for step in name.split("."):
        value = getattr(value, step)
    return value


def _shown(value: object) -> str:
    if isinstance(value, SecretStr):
        text = value.get_secret_value()
        return _USER_INFO.sub(MASK, text) if "://" in text else MASK
    return str(value)
