"""Back up and prefetch through the agent, beside the mover in this process, on the same store, in one run.

    python benchmarks/agent.py [--json FILE] [--pairs N] [--small]

Both sides move the same number of bytes between host memory and the same storage node over loopback TCP,
interleaved, and which one goes first alternates. `mover` is `PageMover` in this process: put, confirm, commit
over REST; lookup over REST, lease check, get. `agent` is an engine's whole way through the agent's socket:
slots and publish with its write-through, waited for; a prefetch, waited for, and its lock released. For the
agent the pages are evicted from host memory before each prefetch, outside of the timing. The ratio of the
times is the agent's share of the mover's speed; its interval is the range of the middle half of the pairs.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
import time
from pathlib import Path

from _transfer_cases import DEEPSEEK_V4, MHA, PAGE_TOKENS, Case, MoverSide, mover_side, row

from caketin.stack import AgentOptions, Stack, StackSettings
from dataplane.agent_client import AgentClient, AgentSession
from dataplane.messages.agent import AgentPool, SessionRequest
from dataplane.messages.control import NamespaceMessage, PoolMessage
from metadata.codec import PageHashes
from metadata.pools import RankPool

TARGET = 0.95
WINDOW_SLOTS = 8


class AgentSide:
    """An engine at the agent's socket. The memory is touched already; filling it is the engine's own work."""

    def __init__(self, case: Case, session: AgentSession) -> None:
        self.case, self.session = case, session
        self.whole = [s.name for s in case.specs if s.name not in case.windows]

    def put(self, hashes: PageHashes) -> float:
        start = time.perf_counter()
        session = self.session
        if self.case.windows:
            first = session.publish(session.slots(hashes, pools=self.whole).token, backup=False)
            assert first.published == len(hashes)
            last = session.slots(hashes[-1:], parent=hashes[-2])
            session.publish(last.token, backup=False)
            ended = session.wait(session.back_up(hashes))
        else:
            done = session.publish(session.slots(hashes).token)
            ended = session.wait(done.transfer_id)
        took = time.perf_counter() - start
        assert ended.transfers_done, ended
        return took

    def evict(self) -> None:
        """Have every slot given to pages that nobody asks for."""
        other = self.case.fresh()
        self.session.publish(self.session.slots(other, pools=self.whole).token, backup=False)
        if self.case.windows:
            tail = other[-WINDOW_SLOTS:]
            self.session.publish(
                self.session.slots(tail, parent=other[-WINDOW_SLOTS - 1]).token, backup=False
            )
        assert self.session.match(other, lock=False).pages == len(other)

    def get(self, hashes: PageHashes) -> float:
        start = time.perf_counter()
        done = self.session.wait(self.session.prefetch(hashes))
        if done.token is not None:
            self.session.release(done.token)
        took = time.perf_counter() - start
        assert done.transfers_done, done
        return took


def pair(mover: MoverSide, agent: AgentSide, mover_first: bool) -> dict[str, float]:
    ours, theirs = agent.case.fresh(), agent.case.fresh()
    times: dict[str, float] = {}
    sides = [("mover", mover, ours), ("agent", agent, theirs)]
    for direction in ("put", "get"):
        if direction == "get":
            agent.evict()
        for name, side, hashes in sides if mover_first else reversed(sides):
            times[f"{name} {direction}"] = getattr(side, direction)(hashes)
    for _, _, hashes in sides:
        mover.drop(hashes)
    return times


def measure(case: Case, stack: Stack, pairs: int) -> dict[str, object]:
    request = SessionRequest(
        engine_id="bench-agent",
        rank="dp0-pp0-cp0-tp0",
        incarnation=secrets.token_hex(16),
        namespace=NamespaceMessage(model="bench", revision=case.revision, page_size=PAGE_TOKENS),
        pools=[
            _agent_pool(p, WINDOW_SLOTS if p.spec.name in case.windows else case.pages) for p in case.pools
        ],
    )
    with (
        mover_side(case, stack.url, "bench-mover") as mover,
        AgentClient(stack.agent_socket, seconds=120) as engine,
        engine.open(request) as session,
    ):
        agent = AgentSide(case, session)
        pair(mover, agent, mover_first=True)  # first touch of the segment
        times = [pair(mover, agent, mover_first=i % 2 == 0) for i in range(pairs)]
    found: dict[str, object] = {"case": case.name, "bytes": case.bytes, "pairs": pairs}
    for direction in ("put", "get"):
        by_side = [(name, [t[f"{name} {direction}"] for t in times]) for name in ("mover", "agent")]
        found[direction] = row(case.bytes, by_side[0], by_side[1])
    return found


def _agent_pool(pool: RankPool, slots: int) -> AgentPool:
    message = PoolMessage.of(pool)
    return AgentPool(**{n: getattr(message, n) for n in message.__struct_fields__}, capacity_pages=slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="small cases, for a quick look")
    arguments = parser.parse_args()
    pages = 64 if arguments.small else 512
    cases = [Case(f"DeepSeek V4, {pages} pages", DEEPSEEK_V4, pages), Case(f"MHA, {pages} pages", MHA, pages)]
    rows = []
    for case in cases:
        # A stack for each: what one case leaves in store and memory is no part of the next.
        with tempfile.TemporaryDirectory(prefix="ct-") as folder:
            options = AgentOptions(_memory(case) + (1 << 20))
            with Stack(StackSettings(Path(folder), None, "mooncake", 6 << 30, agent=options)) as stack:
                rows.append(measure(case, stack, arguments.pairs))
        for direction in ("put", "get"):
            told = rows[-1][direction]
            low, high = told["middle_half"]
            print(
                f"{case.name:24} {direction}: mover {told['mover_gbps']:6.2f} GB/s, agent "
                f"{told['agent_gbps']:6.2f} GB/s, ratio {told['ratio']:.3f} [{low:.3f}, {high:.3f}]",
                flush=True,
            )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"target": TARGET, "rows": rows}, indent=2) + "\n")


def _memory(case: Case) -> int:
    return sum(
        (s.bytes_per_page + 8192) * (WINDOW_SLOTS if s.name in case.windows else case.pages)
        for s in case.specs
    )


if __name__ == "__main__":
    main()
