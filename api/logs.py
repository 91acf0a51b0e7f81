"""One log line an event, as JSON or for a terminal, with the request's id and without secrets.

Everything that logs (this package, `metadata`, uvicorn, redis) goes through one handler, so that no line gets
around the masking.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any, Final, Literal, TextIO, TypeAlias

import structlog
from structlog.typing import Processor

LogFormat: TypeAlias = Literal["json", "console"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

MASK: Final = "***"
_SECRET_NAMES: Final = re.compile(
    r"(?:^|_)(?:authorization|cookie|extra_key|key_file|password|salt|secret|token)s?$"
)
_USER_INFO: Final = re.compile(r"(?<=://)[^/@\s\"']+(?=@)")
_BEARER: Final = re.compile(r"(?i)\b(bearer\s+)[^\s\"',]+")
_ACCESS_TOKEN: Final = re.compile(r"\bct_[A-Za-z0-9_-]{43}")
"""Wherever somebody puts one: into a path, a query, a request id."""
_SHORTEST_SECRET: Final = 4
"""A shorter secret masked wherever it appears would make logs unreadable, and is none."""


class Masking:
    """Takes secrets out of a rendered line: known ones, passwords in URLs, bearer tokens."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        known = sorted({s for s in secrets if len(s) >= _SHORTEST_SECRET}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def text(self, line: str) -> str:
        """Return `line` without secrets."""
        line = _USER_INFO.sub(MASK, line)
        line = _BEARER.sub(rf"\g<1>{MASK}", line)
        line = _ACCESS_TOKEN.sub(MASK, line)
        return self._known.sub(MASK, line) if self._known else line

    def fields(self, _logger: object, _method: str, event: MutableMapping[str, Any]) -> Any:
        """Mask fields whose name says that they are secret (a structlog processor)."""
        for name in event:
            if _SECRET_NAMES.search(name) and event[name] is not None:
                event[name] = MASK
        return event

    def rendered(self, _logger: object, _method: str, line: Any) -> Any:
        """Mask a rendered line (a structlog processor after the renderer)."""
        return self.text(line) if isinstance(line, str) else line


def configure_logging(
    log_format: LogFormat = "json",
    level: LogLevel = "info",
    secrets: Sequence[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Have the whole process log lines of `log_format` to `stream` (standard error).

    Args:
        log_format: one JSON object a line, or for a person at a terminal.
        level: the least level that is written.
        secrets: values that must not appear in any line.
        stream: where to; None is standard error.
    """
    masking = Masking(secrets)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        masking.fields,
    ]
    renderer: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if log_format == "json"
        # Plain tracebacks: the pretty ones show local variables, and those may be secrets.
        else [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)]
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *renderer,
                masking.rendered,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger
