"""`kvstore bench peers`: this store and comparable ones, each in a process of its own, in turns.

The runner's side: `roster` (who takes part), `course` (the rounds), `process`, `show`, `command`.
The other side, under any Python that has the peer installed: `start`, `worker`, `system` (the
interface), `blocks`, and one module a system. Those import their peer, numpy, and each other.
"""
