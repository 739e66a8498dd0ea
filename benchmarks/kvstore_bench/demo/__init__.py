"""`make demo`: what kvstore gains on a real vLLM, and whether every answer stays right.

One fixed workload, several engines, one daemon, and a SIGKILL to all of them. Read `course.py`
first: the phases in order. `verdict.py` says what must come out.
"""
