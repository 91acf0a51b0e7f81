"""Jobs: what a call started and did not wait for."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from api import bodies
from api.context import ContextDep, TenantDep
from api.schemas.namespaces import Job

router = APIRouter(prefix="/v1/jobs", tags=["namespaces"])


@router.get("/{job_id}", response_model=Job)
async def get_job(
    request: Request,
    context: ContextDep,
    tenant: TenantDep,
    job_id: Annotated[str, Path(pattern="^[a-z0-9-]{1,64}$")],
) -> Response:
    """Say where a job stands."""
    job = await context.purges.job(tenant, job_id)
    return bodies.answer(request, Job(state=job.state, done=job.done, total=job.total, error=job.error))
