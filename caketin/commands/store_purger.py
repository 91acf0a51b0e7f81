"""The store as far as the control plane's purge needs it: opened for a purge, closed after it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from api.settings import StoreSettings
from dataplane.messages.control import FileAccess, MooncakeAccess
from dataplane.store_access import open_store


@dataclass(frozen=True)
class StorePurger:
    """Implements `api.purges.ObjectPurger`; a control plane that never purges never loads a store."""

    settings: StoreSettings

    def remove_prefix(self, prefix: str) -> int:
        """Remove every object of one namespace; return how many there were.

        Raises:
            StoreError: the store cannot be reached, or `prefix` is not one namespace.
        """
        with contextlib.closing(open_store(self._access(prefix))) as store:
            return store.remove_prefix(prefix)

    def _access(self, prefix: str) -> FileAccess | MooncakeAccess:
        s = self.settings
        if s.kind == "file":
            return FileAccess(path=s.path, key_prefix=prefix)
        return MooncakeAccess(
            master=s.master,
            metadata=s.metadata,
            # A purge moves no bytes: only the master is asked, and this machine may have no RDMA device.
            protocol="tcp",
            devices="",
            key_prefix=prefix,
        )
