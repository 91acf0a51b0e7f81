"""An engine as a process of its own, so that it can be killed: `python -m tests.agent.engine_process SPEC`.

SPEC is JSON. `hold`: it publishes a prompt, locks it, asks for slots, says `ready` and waits to be killed.
`busy`: it works through prompts that it shares with others until it is killed, opens a new session whenever
the agent is gone, and ends with code 3 as soon as a restored byte is wrong.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from typing import Any

from dataplane.agent_client import AgentAway, AgentClient, AgentRefused
from tests.agent.world import KV_SWA, Engine, prompt, session_request

WRONG_BYTES = 3


def hold(spec: dict[str, Any]) -> None:
    client = AgentClient(spec["socket"])
    session = client.open(session_request(KV_SWA, spec["slots"], engine=spec["engine"], model=spec["model"]))
    engine = Engine(session, KV_SWA)
    pages = prompt(spec["prompt"], spec["pages"])
    engine.publish(pages)
    assert session.match(pages).pages == len(pages)
    session.slots(prompt("never published", spec["reserved"]))
    print("ready", flush=True)
    time.sleep(600)


def busy(spec: dict[str, Any]) -> None:
    dice = random.Random(spec["seed"])
    print("ready", flush=True)
    while True:
        with (
            contextlib.suppress(AgentAway, AgentRefused, FileNotFoundError),
            AgentClient(spec["socket"], seconds=20) as client,
        ):
            request = session_request(KV_SWA, spec["slots"], engine=spec["engine"], model=spec["model"])
            session = client.open(request)
            engine = Engine(session, KV_SWA)
            while not session.ended.is_set():
                one_request(engine, dice)
        time.sleep(0.05)


def one_request(engine: Engine, dice: random.Random) -> None:
    session = engine.session
    trunk = prompt(f"trunk {dice.randrange(3)}", 4)
    pages = trunk + prompt(f"branch {dice.randrange(8)}", dice.randrange(1, 8), after=trunk)
    policy = dice.choice(["wait_complete", "best_effort", "timeout"])
    started = session.prefetch(pages, policy=policy, deadline_ms=dice.choice([20, 300, 1500]))
    if dice.random() < 0.2:
        session.cancel(started)
    done = session.wait(started)
    length = done.restorable[-1][1] if done.token and done.restorable else 0
    if length:
        try:
            engine.check(pages, done.slots, length)
        except AssertionError as error:
            # Whoever lost its session may see what others write; only a session that lives is promised bytes.
            session.match([])
            print(f"WRONG {error} {done}", flush=True)
            sys.exit(WRONG_BYTES)
        print(f"restored {length}", flush=True)
    if length < len(pages):
        with contextlib.suppress(AgentRefused):
            token = engine.fill(pages[length:], parent=pages[length - 1] if length else None)
            if dice.random() < 0.9:
                session.publish(token, backup=dice.random() < 0.8)
    if done.token and dice.random() < 0.9:
        session.release(done.token)


def main() -> None:
    spec = json.loads(sys.argv[1])
    (busy if spec.get("busy") else hold)(spec)


if __name__ == "__main__":
    main()
