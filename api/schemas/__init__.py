"""What every call takes and gives: one module a resource, pydantic models and nothing else."""
