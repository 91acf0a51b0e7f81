"""The former place of `dataplane.child_process`."""

from dataplane.child_process import ChildFailed, ChildProcess, accepts, die_with_parent, free_port

__all__ = ["ChildFailed", "ChildProcess", "accepts", "die_with_parent", "free_port"]
