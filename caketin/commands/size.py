"""`caketin size`: the memory of L3 for a hit rate, from a trace of prompts."""

from __future__ import annotations

import json as jsonlib
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from rich.table import Table

from caketin.access_token import TokenFileOption, access_token
from caketin.commands.console import clear_errors, out
from caketin.model_bytes import KvType, ModelBytes, model_bytes
from caketin.model_config import find_config
from caketin.replay.trace import TRACE_PAGE_TOKENS, read_trace
from caketin.sizing import HitCurve, hit_curve
from metadata.errors import FieldError, InvalidInput

_GIB: Final = 1 << 30
_ROWS: Final = 16
_SECONDS: Final = 5.0


def size(
    trace: Annotated[Path, typer.Argument(help="a trace file, one JSON object with hash_ids a line")],
    *,
    model: Annotated[
        str | None, typer.Option(help="a known model's name, or a config.json or the folder that has it")
    ] = None,
    kv_dtype: Annotated[
        KvType | None, typer.Option(help="of --model: of its keys and values; auto: as its config.json says")
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option(
            help="of --model: tokens of an engine's page; 64 unless told, for DeepSeek V4 256",
            min=1,
            max=1 << 20,
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(help="of --model: ranks that share its heads; 1 unless told", min=1, max=4096),
    ] = None,
    state_tokens: Annotated[
        int | None,
        typer.Option(
            help="of --model: tokens between stored states of linear attention; a page unless told",
            min=1,
            max=1 << 24,
        ),
    ] = None,
    bytes_per_token: Annotated[
        float | None, typer.Option(help="of all pools on all ranks together", min=0.001, max=1e12)
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="take them from what the engines of this namespace registered")
    ] = None,
    url: Annotated[
        str, typer.Option(envvar="CAKETIN_URL", help="the control plane that knows the namespace")
    ] = "http://127.0.0.1:7411",
    token_file: TokenFileOption = None,
    page_tokens: Annotated[int, typer.Option(help="tokens of a block of the trace", min=1)] = (
        TRACE_PAGE_TOKENS
    ),
    hit_rate: Annotated[
        list[float] | None, typer.Option(help="wanted, in percent; may be repeated", min=0, max=100)
    ] = None,
    warmup: Annotated[
        float, typer.Option(help="share of the trace that only fills the cache", min=0, max=0.99)
    ] = 0.5,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say how much memory a hit rate takes, and what each size would bring.

    The store is taken to forget what was not used for longest, as Mooncake does about. Pools of windows count
    with every page, as engines write them; states once a page, unless --state-tokens says how far apart they
    are.
    """
    with clear_errors():
        _only_one({"--model": model, "--bytes-per-token": bytes_per_token, "--namespace": namespace})
        of_model = {
            "--kv-dtype": kv_dtype,
            "--page-size": page_size,
            "--tp": tp,
            "--state-tokens": state_tokens,
        }
        sized = None
        if model is not None:
            sized = model_bytes(
                find_config(model),
                kv_type=kv_dtype or KvType.AUTO,
                page_size=page_size,
                tp=tp or 1,
                state_tokens=state_tokens,
            )
            each = sized.per_token
        else:
            _unused(of_model)
            each = bytes_per_token or _registered(url, str(namespace), access_token(token_file))
        curve = hit_curve(read_trace(trace).requests, warmup)
    page_bytes = each * page_tokens
    wanted = [_wanted(curve, percent / 100, page_bytes) for percent in hit_rate or ()]
    rows = [_row(curve, pages, page_bytes) for pages in _sizes(curve.distinct_pages)]
    if json:
        told = {"bytes_per_token": each, "asked_pages": curve.asked_pages, "wanted": wanted, "sizes": rows}
        pools = {} if sized is None else {"page_size": sized.page_size, "pools": sized.pools}
        typer.echo(jsonlib.dumps(told | pools, indent=2))
    else:
        if sized is not None:
            _print_model(sized, states_are_told=state_tokens is not None)
        _print(rows, wanted)
    if any(w["gib"] is None for w in wanted):
        raise typer.Exit(1)


def _only_one(sources: Mapping[str, object]) -> None:
    """Raise unless one of the options that say the bytes of a token is there."""
    if sum(given is not None for given in sources.values()) != 1:
        detail = "give one of --model, --bytes-per-token and --namespace"
        raise InvalidInput("no size of a token", [FieldError("", "missing", detail)])


def _unused(options: Mapping[str, object]) -> None:
    for flag, given in options.items():
        if given is not None:
            raise InvalidInput("no model", [FieldError(flag, "unused", "goes with --model")])


def _sizes(distinct: int) -> list[int]:
    """Sizes to show: halves of the whole, largest last."""
    return sorted({max(1, distinct >> shift) for shift in range(_ROWS)}) if distinct else []


def _row(curve: HitCurve, pages: int, page_bytes: float) -> dict[str, Any]:
    gib = round(pages * page_bytes / _GIB, 3)
    return {"pages": pages, "gib": gib, "hit_rate": round(curve.hit_rate(pages), 6)}


def _wanted(curve: HitCurve, rate: float, page_bytes: float) -> dict[str, Any]:
    pages = curve.pages_for(rate)
    gib = None if pages is None else round(pages * page_bytes / _GIB, 3)
    return {"hit_rate": rate, "pages": pages, "gib": gib}


def _print_model(sized: ModelBytes, *, states_are_told: bool) -> None:
    pools = ", ".join(f"{name} {size:,.0f}" for name, size in sized.pools.items())
    out.print(
        f"{sized.per_token:,.0f} bytes a token, in pages of {sized.page_size} tokens: {pools}", soft_wrap=True
    )
    if "mamba" in sized.pools and not states_are_told:
        out.print(
            "a state counts once a page, which is the most: say with --state-tokens how far they are apart"
        )


def _print(rows: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    table = Table(title="an L3 of this size would find")
    for name in ("GiB", "pages", "hit rate"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(f"{row['gib']:,.2f}", f"{row['pages']:,}", f"{row['hit_rate']:.2%}")
    out.print(table)
    most = rows[-1]["hit_rate"] if rows else 0.0
    for w in wanted:
        found = (
            f"{w['gib']:,.2f} GiB" if w["gib"] is not None else f"no size: the trace has {most:.2%} at most"
        )
        out.print(f"{w['hit_rate']:.2%} of the pages: {found}")


def _registered(url: str, namespace: str, token: str | None) -> float:
    """Return the bytes of a token over all pools and shards of a namespace.

    Raises:
        InvalidInput: the control plane does not answer, or does not know the namespace.
    """
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    try:
        answer = httpx.get(
            f"{url}/v1/namespaces/{namespace}",
            headers=headers,
            timeout=_SECONDS,
            trust_env=False,
            verify=ssl.create_default_context(),  # with SSL_CERT_FILE, which httpx alone ignores here
        )
        told = answer.json()
        if answer.status_code != httpx.codes.OK:
            raise InvalidInput(
                "no such namespace", [FieldError("--namespace", told["code"], str(told["detail"]))]
            )
        page = sum(
            sum(part["bytes"] for part in pool["parts"]) * pool["shards_expected"] for pool in told["pools"]
        )
        return float(page) / float(told["page_size"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        detail = f"the control plane at {url} does not say: {error}"
        raise InvalidInput("no size of a token", [FieldError("--url", "unavailable", detail)]) from None
