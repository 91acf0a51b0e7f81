"""Lua, one atomic Redis step a file; loaded by `metadata.redis_scripts`."""
