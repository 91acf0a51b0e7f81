"""Another process that uses a store: run as `python -m tests.dataplane.store_process VERB STORE ARGUMENTS`.

It opens the store, prints `ready`, waits for a line on its input (so that several start at once), works, and
prints its result as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.file_store import FileStore
from dataplane.mooncake_native import MooncakeSettings
from dataplane.mooncake_store import MooncakeStore
from dataplane.object_store import ObjectBuffers, ObjectStore


def open_store(description: dict[str, Any]) -> ObjectStore:
    """The store that a test described in plain values."""
    if description["kind"] == "file":
        return FileStore(
            Path(description["root"]),
            max_bytes=description.get("max_bytes"),
            touch_seconds=description.get("touch_seconds", 10.0),
        )
    settings = MooncakeSettings(
        description["master"], master_http=description["master_http"], local_hostname="127.0.0.1"
    )
    return MooncakeStore(settings)


def put_uniform(store: ObjectStore, keys: list[str], value: int, size: int, step: int = 8) -> list[int]:
    """Put objects that consist of one byte value, `step` a call; a code each."""
    memory = np.full(size, value, dtype=np.uint8)
    store.register(memory.ctypes.data, size)
    codes: list[int] = []
    for at in range(0, len(keys), step):
        chunk = keys[at : at + step]
        addresses = np.full(len(chunk), memory.ctypes.data, np.uint64)
        codes += store.put(chunk, ObjectBuffers(addresses, np.full(len(chunk), size))).tolist()
    return codes


def put_for_ever(store: ObjectStore, namespace_id: str, value: int, size: int) -> list[int]:
    """Put page after page until killed."""
    page = 0
    while True:
        keys = [f"ct1/{namespace_id}/{page + i:064x}/3f2a91bc.0/{part}" for i in range(4) for part in "kv"]
        put_uniform_registered(store, keys, value, size, first=page == 0)
        page += 4


_kept: list[np.ndarray] = []


def put_uniform_registered(store: ObjectStore, keys: list[str], value: int, size: int, first: bool) -> None:
    """Put from memory that is registered on the first call."""
    if first:
        _kept.append(np.full(size, value, dtype=np.uint8))
        store.register(_kept[0].ctypes.data, size)
    addresses = np.full(len(keys), _kept[0].ctypes.data, np.uint64)
    store.put(keys, ObjectBuffers(addresses, np.full(len(keys), size)))


def main() -> None:
    verb, description, arguments = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    store = open_store(description)
    print("ready", flush=True)
    sys.stdin.readline()
    verbs = {f.__name__: f for f in (put_uniform, put_for_ever)}
    result = verbs[verb](store, **arguments)
    store.close()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
