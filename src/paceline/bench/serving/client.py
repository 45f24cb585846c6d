"""The load generator of servers, a process of its own that tokenises nothing and reads answers when all are there.

`python -m paceline.bench.serving.client` reads a plan as JSON from stdin and writes lines of JSON to stdout: now and
then how far it is, and at last what it saw.
"""

from __future__ import annotations

import asyncio
import json
import resource
import ssl
import sys
from contextlib import suppress
from typing import Any

from paceline.bench.serving.exchange import Exchange, encode
from paceline.bench.serving.load import Load, Send


def requests_of(plan: dict[str, Any]) -> list[Send]:
    """Each over a connection of its own."""
    tls = ssl.create_default_context() if plan["tls"] else None

    def over_http(body: dict[str, Any]) -> Send:
        request = encode(plan["authority"], body, plan["path"], plan["headers"])

        async def send() -> Exchange:
            _, made = await asyncio.get_running_loop().create_connection(
                lambda: Exchange(request), plan["host"], plan["port"], ssl=tls)
            return made

        return send

    return [over_http(body) for body in plan["bodies"]]


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a connection is an open file, and a burst may be large
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    plan = json.load(sys.stdin)
    load = Load(requests_of(plan), plan["arrivals"], plan["clients"], plan["timeout_s"], say)
    say({"result": asyncio.run(load.run())})


if __name__ == "__main__":
    main()
