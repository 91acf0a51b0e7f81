"""Parts and hit policies as registrations and views write them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from api.schemas.wire import Body, Integer, Text
from metadata.pools import AllPages, BlockGroups, HitPolicy, TrailingPages


class PartBody(Body):
    """One buffer of a shard of a page; `bytes` 0 means that the part does not exist."""

    part: Text
    dtype: Text
    bytes: Integer


class AllPagesBody(Body):
    """A prefix of n pages needs all n."""

    kind: Literal["all_pages"] = "all_pages"

    def to_policy(self) -> AllPages:
        """Return the policy as the domain knows it."""
        return AllPages()


class TrailingPagesBody(Body):
    """A prefix of n pages needs the last `window_pages` of them."""

    kind: Literal["trailing_pages"] = "trailing_pages"
    window_pages: Integer

    def to_policy(self) -> TrailingPages:
        """Return the policy as the domain knows it."""
        return TrailingPages(self.window_pages)


class BlockGroupsBody(Body):
    """Gates nothing; reports the pages that the leading complete groups cover."""

    kind: Literal["block_groups"] = "block_groups"
    block: Integer
    group: Integer

    def to_policy(self) -> BlockGroups:
        """Return the policy as the domain knows it."""
        return BlockGroups(self.block, self.group)


HitPolicyBody: TypeAlias = Annotated[
    AllPagesBody | TrailingPagesBody | BlockGroupsBody, Field(discriminator="kind")
]


def policy_body(policy: HitPolicy) -> AllPagesBody | TrailingPagesBody | BlockGroupsBody:
    """Return the domain's policy as a body."""
    match policy:
        case AllPages():
            return AllPagesBody()
        case TrailingPages(window):
            return TrailingPagesBody(window_pages=window)
        case BlockGroups(block, group):
            return BlockGroupsBody(block=block, group=group)
