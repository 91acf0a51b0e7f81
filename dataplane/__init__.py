"""Moves bytes: host memory on one side, the object store on the other. Imports `metadata`, never `api`."""
