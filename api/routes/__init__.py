"""One router a resource; handlers parse, call one thing of `metadata`, and answer."""
