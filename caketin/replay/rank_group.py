"""The ranks of one engine: the leader asks the control plane, all move, and a page counts where all have it.

The leader is this process; every other rank is a process of its own, with its own memory and its own client
of the store. Each request in flight has a pipe to each of them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final, Literal, overload

import msgspec

from caketin.replay.rank import Rank, ReplaySettings, Restored, Stored, joined_rank
from dataplane.child_process import ChildFailed, die_with_parent
from dataplane.messages.control import LookupResult
from metadata.codec import PageHashes
from metadata.errors import CaketinError

_JOIN_SECONDS: Final = 60.0
_END_SECONDS: Final = 10.0


@dataclass(frozen=True)
class _Joined:
    """A follower's first word: None, or why it could not join."""

    error: str | None


@dataclass(frozen=True)
class _Follower:
    name: str
    process: BaseProcess
    pipes: list[Connection]

    def hear(self, lane: int, seconds: float) -> Any:
        """Return the next message.

        Raises:
            ChildFailed: the process ended, or said nothing in time.
        """
        try:
            if self.pipes[lane].poll(seconds):
                return self.pipes[lane].recv()
        except (EOFError, OSError):
            self.process.join(1.0)
            raise ChildFailed(f"rank {self.name} ended with code {self.process.exitcode}") from None
        raise ChildFailed(f"rank {self.name} did not answer within {seconds:g} s")

    def tell(self, lane: int, message: object) -> None:
        """Send a message.

        Raises:
            ChildFailed: the process ended.
        """
        try:
            self.pipes[lane].send(message)
        except OSError:
            self.process.join(1.0)
            raise ChildFailed(f"rank {self.name} ended with code {self.process.exitcode}") from None


class RankGroup:
    """All ranks. A request in flight uses a lane number of its own, from 0 on."""

    def __init__(self, leader: Rank, followers: Sequence[_Follower], transfer_seconds: float) -> None:
        self.leader = leader
        self._followers = followers
        self._seconds = transfer_seconds
        # A follower keeps its own deadlines; this is for one that cannot even say so.
        self._patience = 3 * transfer_seconds

    def prefetch(self, lane: int, hashes: PageHashes, promise: LookupResult) -> Restored:
        """Have all ranks read; return what every one of them has restored.

        A rank that restored less than the others makes them read again at its length: a window at the longer
        length is of no use there.

        Raises:
            ChildFailed: a rank is gone.
        """
        asked, first, total, read, wrong = promise, None, 0.0, 0, set[int]()
        while True:
            done = self._all(lane, "prefetch", hashes, asked)
            total += max(d.seconds for d in done)
            read += sum(d.bytes for d in done)
            wrong.update(page for d in done for page in d.wrong)
            first = first or done
            pages = min(d.pages for d in done)
            if pages == max(d.pages for d in done) or total > self._seconds:
                break
            asked = _cut(promise, pages)
        agreed = pages if pages == max(d.pages for d in done) else 0
        because = next((d.lost_because for d in sorted(first, key=_length) if d.lost_because), None)
        error = next((d.error for d in first if d.error), None)
        leased = min(d.leased_pages for d in first)
        return Restored(agreed, read, total, sorted(p for p in wrong if p < agreed), because, error, leased)

    def back_up(self, lane: int, hashes: PageHashes, first: int) -> Stored:
        """Have all ranks write what is theirs.

        Raises:
            ChildFailed: a rank is gone.
        """
        done = self._all(lane, "back_up", hashes, first)
        return Stored(
            claimed=max(d.claimed for d in done),
            bytes=sum(d.bytes for d in done),
            seconds=max(d.seconds for d in done),
            unstored=max(d.unstored for d in done),
            rejected=sum((d.rejected for d in done), Counter()),
            error=next((d.error for d in done if d.error), None),
        )

    @overload
    def _all(
        self, lane: int, call: Literal["prefetch"], hashes: PageHashes, argument: LookupResult
    ) -> list[Restored]: ...
    @overload
    def _all(
        self, lane: int, call: Literal["back_up"], hashes: PageHashes, argument: int
    ) -> list[Stored]: ...
    def _all(self, lane: int, call: str, hashes: PageHashes, argument: Any) -> list[Any]:
        """Have all ranks do the same at the same time; return what each says, the leader first."""
        for follower in self._followers:
            follower.tell(lane, (call, hashes.raw, _plain(argument)))
        own = _do(self.leader, call, hashes, argument)
        return [own, *(follower.hear(lane, self._patience) for follower in self._followers)]

    def reported_pages(self) -> int:
        """Return the pages that all ranks reported missing, each call for itself."""
        for follower in self._followers:
            follower.tell(0, ("reported_pages", b"", None))
        theirs: list[int] = [follower.hear(0, self._patience) for follower in self._followers]
        return self.leader.client.reported_pages + sum(theirs)


@contextlib.contextmanager
def rank_group(settings: ReplaySettings, longest: int) -> Iterator[RankGroup]:
    """Start the followers, join, and end with all of them gone. Only in the main thread, where there are any.

    Raises:
        ChildFailed: a follower could not join.
        CaketinError: the leader could not join; see `joined_rank`.
    """
    followers: list[_Follower] = []
    with contextlib.ExitStack() as undo:
        undo.callback(_end, followers)
        followers.extend(_start(settings, tp_rank, longest) for tp_rank in range(1, settings.tp))
        leader = undo.enter_context(joined_rank(settings, 0, longest))
        for follower in followers:
            said = follower.hear(0, _JOIN_SECONDS)
            if said.error is not None:
                raise ChildFailed(f"rank {follower.name} could not join: {said.error}")
        yield RankGroup(leader, followers, settings.transfer_seconds)


def _start(settings: ReplaySettings, tp_rank: int, longest: int) -> _Follower:
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(settings.concurrency)]
    process = context.Process(
        target=follow,
        args=(settings, tp_rank, longest, [theirs for _, theirs in pairs]),
        name=f"caketin-replay-tp{tp_rank}",
        daemon=True,
    )
    process.start()
    for _, theirs in pairs:
        theirs.close()
    return _Follower(f"tp{tp_rank}", process, [ours for ours, _ in pairs])


def _end(followers: Sequence[_Follower]) -> None:
    """Close the pipes, which is how a follower learns that it is over, and see that it has ended."""
    for follower in followers:
        for pipe in follower.pipes:
            pipe.close()
    for follower in followers:
        follower.process.join(_END_SECONDS)
        if follower.process.is_alive():
            follower.process.kill()
            follower.process.join()


def follow(settings: ReplaySettings, tp_rank: int, longest: int, pipes: Sequence[Connection]) -> None:
    """Be a rank that does what the leader says, until the leader hangs up."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader ends us in order
    try:
        with joined_rank(settings, tp_rank, longest) as rank:
            pipes[0].send(_Joined(None))
            lanes = [threading.Thread(target=_serve, args=(rank, pipe), daemon=True) for pipe in pipes]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
        if rank.hanging:
            os._exit(0)  # a native call that hangs would abort an orderly end of the process
    except CaketinError as error:
        with contextlib.suppress(OSError):
            pipes[0].send(_Joined(str(error)))


def _serve(rank: Rank, pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            call, raw, argument = pipe.recv()
            if isinstance(argument, bytes):
                argument = msgspec.msgpack.decode(argument, type=LookupResult)
            pipe.send(_do(rank, call, PageHashes(raw), argument))


def _do(rank: Rank, call: str, hashes: PageHashes, argument: Any) -> Any:
    match call:
        case "prefetch":
            return rank.prefetch(hashes, argument)
        case "back_up":
            return rank.back_up(hashes, argument)
        case "reported_pages":
            return rank.client.reported_pages
    raise ValueError(call)


def _plain(argument: Any) -> Any:
    return msgspec.msgpack.encode(argument) if isinstance(argument, LookupResult) else argument


def _length(done: Restored) -> int:
    return done.pages


def _cut(promise: LookupResult, pages: int) -> LookupResult:
    """Return the promise as if it had ended at `pages`, one of its lengths."""
    runs = [(first, min(last, pages)) for first, last in promise.restorable if first <= pages]
    return msgspec.structs.replace(promise, hit_pages=pages, restorable=runs)
