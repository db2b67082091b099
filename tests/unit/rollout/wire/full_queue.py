"""A process with one end of a connection that reads nothing until it is told to; `test_transport` plays the other end.

    python -m tests.unit.rollout.wire.full_queue router ADDRESS      binds; prints the address
    python -m tests.unit.rollout.wire.full_queue dealer ADDRESS      connects and sends one message

Each line on standard input makes it read all that is there and print how many messages that were.
"""

from __future__ import annotations

import sys

from rollout.wire.transport import Context, Poller


def main(kind: str, address: str) -> None:
    """Hold the end; see the module."""
    context = Context()
    if kind == "router":
        router = context.router(address, 2**20)
        end, address = router, router.address
    else:
        end = context.dealer(address, 2**20)
        end.send([b"hello"])
    print(address, flush=True)
    for _ in sys.stdin:
        count = 0
        while Poller([end]).wait(0.3):
            while end.receive() is not None:
                count += 1
        print(count, flush=True)
    context.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
