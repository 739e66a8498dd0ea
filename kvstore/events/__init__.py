"""KV events: what this host holds, announced to routers in the form that vLLM's engines use.

    feed.py       on the event loop: what changed, and the tokens that engines send
    book.py       what is announced, and of which tokens each block is (pure)
    table.py      one row a block, in packed arrays (pure)
    order.py      parents before children (pure)
    wire.py       batches and sequence numbers as bytes (pure)
    streams.py    one topic: its sequence, its pace, what replay can fill (pure)
    replays.py    what a subscriber missed, sent to it alone
    publisher.py  the thread with the sockets
    service.py    the facade: settings become a feed and a publisher

Whoever reads the stream learns the token ids of prompts. Imported with `events.publish` alone.
"""
