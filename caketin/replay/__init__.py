"""Replays a load through the whole path: real hash chains, real lookups, real bytes, verified."""
