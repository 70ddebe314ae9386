"""`tests.rpc.scripted_server` with the ids of "c" and "d" exchanged: `python -m tests.rpc.other_server DIR`."""

from __future__ import annotations

import asyncio
import sys

from tests.rpc import scripted_server

if __name__ == "__main__":
    vocabulary = scripted_server.VOCABULARY
    vocabulary[3], vocabulary[4] = vocabulary[4], vocabulary[3]
    asyncio.run(scripted_server.main(*sys.argv[1:]))
