"""An engine as a process of its own, so that it can be killed: `python -m tests.agent.engine_process SPEC`.

SPEC is JSON: socket, engine, model, slots, what to publish, what to hold. It says `ready` and then waits to
be killed, or, told to, goes on filling and publishing for ever.
"""

from __future__ import annotations

import json
import random
import sys
import time

from dataplane.agent_client import AgentClient, AgentRefused
from tests.agent.world import KV_SWA, Engine, prompt, session_request


def main() -> None:
    spec = json.loads(sys.argv[1])
    client = AgentClient(spec["socket"])
    session = client.open(session_request(KV_SWA, spec["slots"], engine=spec["engine"], model=spec["model"]))
    engine = Engine(session, KV_SWA)
    pages = prompt(spec["prompt"], spec["pages"])
    engine.publish(pages)
    found = session.match(pages)
    assert found.pages == len(pages)
    session.slots(prompt("never published", spec["reserved"]))
    print("ready", flush=True)
    if spec.get("busy"):
        dice = random.Random(spec["engine"])
        while True:
            try:
                engine.fill(prompt(f"busy {dice.random()}", 2))
                session.prefetch(pages)
                session.back_up(pages)
            except AgentRefused:
                time.sleep(0.01)
    time.sleep(600)


if __name__ == "__main__":
    main()
