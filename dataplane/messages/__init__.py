"""The calls as the data plane speaks them: msgspec structs, and how they become bytes and back.

`control` holds the calls to the control plane, `agent` those of the agent, `wire` the bytes. The control
plane has models of its own, which import nothing from here: the fixtures of `tests/contract` hold both to
one contract.
"""
