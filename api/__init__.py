"""The control plane: FastAPI over what `metadata` knows. Imports `metadata`, never `dataplane`."""
