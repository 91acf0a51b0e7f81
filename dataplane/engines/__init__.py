"""One module an engine: adapters that translate the engine's calls for the page mover."""
