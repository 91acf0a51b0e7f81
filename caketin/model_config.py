"""A model's `config.json` as Hugging Face publishes it: found, read, and its fields checked one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from caketin.known_models import MODELS
from metadata.errors import FieldError, InvalidInput

OTHERWISE: Final = "give --bytes-per-token or --namespace instead"

_MOST_BYTES: Final = 16 << 20
_MOST: Final = 1_000_000
_MOST_LAYERS: Final = 10_000
# Models that see and hear keep the language model's fields in an object of their own.
_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True)
class ModelConfig:
    """The fields of a language model.

    Attributes:
        source: the file or the name that they are from, for messages.
        fields: the object that has `num_hidden_layers`.
        whole: the object around it, or the same one.
        prefix: path from the whole to the fields, such as `text_config.`.
    """

    source: str
    fields: Mapping[str, Any]
    whole: Mapping[str, Any]
    prefix: str = ""

    def has(self, name: str) -> bool:
        """Say whether there is a value; null is none."""
        return self.fields.get(name) is not None

    def count(self, *names: str) -> int:
        """Return the first of these fields that is there: a whole number of at least 1.

        Raises:
            InvalidInput: none is there, or it is no such number.
        """
        name = next((n for n in names if self.has(n)), None)
        if name is None:
            raise self.refused(names[0], "missing", f"is missing in {self.source}")
        return self._number(name, self.fields[name], _MOST)

    def layers(self) -> int:
        """Return the number of layers, those of a draft (MTP) left out."""
        if not self.has("num_hidden_layers") and self.has("layers_block_type"):
            return len(self.items("layers_block_type"))
        return self._number("num_hidden_layers", self.count("num_hidden_layers"), _MOST_LAYERS)

    def optional(self, name: str, otherwise: int) -> int:
        """Return a field of at least 1 or, where it is missing, something else."""
        return self.count(name) if self.has(name) else otherwise

    def text(self, name: str) -> str:
        """Return a field of text, or nothing where it is missing or no text."""
        told = self.fields.get(name)
        return told if isinstance(told, str) else ""

    def items(self, name: str) -> list[Any]:
        """Return a field that is a list.

        Raises:
            InvalidInput: it is none, or longer than any model.
        """
        told = self.fields.get(name)
        if not isinstance(told, list) or len(told) > _MOST_LAYERS:
            raise self.refused(name, "invalid", f"of {self.source} is no list with an entry a layer")
        return told

    def inner(self, name: str) -> ModelConfig:
        """Return the fields of an object inside.

        Raises:
            InvalidInput: it is no object.
        """
        told = self.fields.get(name)
        if not isinstance(told, dict):
            raise self.refused(name, "invalid", f"of {self.source} is no object")
        return ModelConfig(self.source, told, self.whole, f"{self.prefix}{name}.")

    def refused(self, name: str, code: str, detail: str) -> InvalidInput:
        """Return the error that this field does not say what is needed."""
        return InvalidInput(
            "no size of a token", [FieldError(self.prefix + name, code, f"{detail}; {OTHERWISE}")]
        )

    def _number(self, name: str, told: object, most: int) -> int:
        if not isinstance(told, int) or isinstance(told, bool) or not 1 <= told <= most:
            shown = repr(told) if len(repr(told)) <= 40 else repr(told)[:40] + "..."  # noqa: PLR2004
            raise self.refused(
                name, "out_of_range", f"of {self.source} is {shown}, no whole number from 1 to {most:,}"
            )
        return told


def find_config(model: str) -> ModelConfig:
    """Return the configuration of a known model, or of a file, or of a folder with a `config.json`.

    Raises:
        InvalidInput: there is none, or it cannot be read.
    """
    known = MODELS.get(model.lower())
    if known is not None:
        return ModelConfig(model, known, known)
    path = Path(model)
    try:
        if path.is_dir():
            return parse_config(str(path / "config.json"), _read(path / "config.json"))
        if path.exists():
            return parse_config(model, _read(path))
    except (OSError, ValueError) as error:  # a name with a zero byte, or longer than names are
        raise _no_model("unreadable", f"{model[:200]!r}: cannot be read: {error}") from None
    known = MODELS.get(model.lower().rpartition("/")[2])
    if known is not None:  # with the owner before it, as on the Hub
        return ModelConfig(model, known, known)
    names = ", ".join(sorted(MODELS))
    raise _no_model("unknown", f"{model[:200]!r} is no file and no known model; known are {names}")


def parse_config(source: str, text: str) -> ModelConfig:
    """Return the configuration in a text.

    Raises:
        InvalidInput: it is no JSON object with `num_hidden_layers`, nested or not.
    """
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_model("invalid", f"{source} is no JSON: {error}") from None
    if not isinstance(told, dict):
        raise _no_model("invalid", f"{source} is no JSON object, hence no config.json of a model")
    fields, prefix = told, ""
    while "num_hidden_layers" not in fields:
        name = next((n for n in _NESTED if isinstance(fields.get(n), dict)), None)
        if name is None:
            break
        fields, prefix = fields[name], f"{prefix}{name}."
    return ModelConfig(source, fields, told, prefix)


def _read(path: Path) -> str:
    if not path.is_file():
        raise OSError("it is no file" if path.exists() else f"there is no {path.name} in it")
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise OSError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    return raw.decode()


def _no_model(code: str, detail: str) -> InvalidInput:
    return InvalidInput("no size of a token", [FieldError("--model", code, f"{detail}; {OTHERWISE}")])
