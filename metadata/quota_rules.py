"""How much a tenant may have claimed in the index, and what one commit adds to it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Amount:
    """Pages and bytes.

    Attributes:
        pages: pages with at least one pool of theirs.
        bytes: bytes of all pools on all shards.
    """

    pages: int = 0
    bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.pages + other.pages, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds of one tenant over all its namespaces; None does not bound."""

    max_pages: int | None = None
    max_bytes: int | None = None

    @property
    def is_bound(self) -> bool:
        """Whether there is anything to keep."""
        return self.max_pages is not None or self.max_bytes is not None

    def excess(self, claimed: Amount, more: Amount) -> str | None:
        """Return why `more` does not fit beside what is `claimed`, as a sentence, or None.

        A call that adds nothing fits always: it is how an engine reports that it kept nothing.
        """
        for name, bound, has, adds in (
            ("pages", self.max_pages, claimed.pages, more.pages),
            ("bytes", self.max_bytes, claimed.bytes, more.bytes),
        ):
            if bound is not None and adds > 0 and has + adds > bound:
                return (
                    f"the tenant has {has} {name} claimed of {bound}, and this call brings up to {adds} "
                    "more: purge a namespace, or ask the operator for a larger quota"
                )
        return None
