"""Check by a third party: Dynamo's KV indexer answers `longest_matched` from a real engine's events.

The indexer listens on all addresses, so this runs only where loopback is the only network:

    unshare -rn sh -c 'ip link set lo up && python -m tests.integration.dynamo_indexer --python PYTHON'

PYTHON has ai-dynamo-runtime. Exits 0 if every answer is right. Run by hand and by CI.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports JAX
sys.path.insert(0, str(ROOT))

from jaxinfer import Engine, SamplingParams, load  # noqa: E402
from serving.kv_events import ENCODINGS, KvEventHub  # noqa: E402
from serving.zmq_kv_events import ZmqPublisher  # noqa: E402
from tests import checkpoints  # noqa: E402
from tests.integration.processes import Process, free_port  # noqa: E402

FREE = "tcp://127.0.0.1:0"
PATIENCE = 20.0  # seconds for an event to arrive


class Indexer:
    """Dynamo's `python -m dynamo.indexer`, over HTTP."""

    def __init__(self, python: str, folder: Path) -> None:
        port = free_port()
        command = [python, "-m", "dynamo.indexer", "--port", str(port)]
        self.process = Process(command, folder / "indexer.log")
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=10)
        self.process.wait_http(f"http://127.0.0.1:{port}/health")

    def post(self, route: str, **body: Any) -> Any:
        answer = self.http.post(route, json=body)
        assert answer.is_success, f"{route} answered {answer.status_code}: {answer.text}"
        return answer.json()

    def expect(self, tokens: list[int], matched: int, **query: Any) -> None:
        """Wait until the longest match of `tokens` has `matched` tokens, in the end."""
        end = time.monotonic() + PATIENCE
        while True:
            answer = self.post("/query", token_ids=tokens, **query)
            found = max((i["longest_matched"] for i in answer["instances"].values()), default=0)
            if found == matched:
                print(f"  longest_matched {found:4d} of {len(tokens):4d} tokens: right", flush=True)
                return
            if time.monotonic() > end:
                log = self.process.output()[-3000:]
                raise SystemExit(f"longest_matched is {found}, not {matched}: {answer}\n{log}")
            time.sleep(0.1)


async def generate(engine: Engine, tokens: list[int], **options: Any) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    async for _ in engine.generate({"prompt_token_ids": tokens}, params, **options):
        pass


async def check(indexer: Indexer, folder: Path, instance: int, encoding: str) -> None:
    print(f"encoding {encoding}:")
    engine = Engine(load(str(folder)), max_model_len=128, num_pages=49, progress=False)
    hub, size = KvEventHub(), engine.core.config.page_size
    publisher = ZmqPublisher(hub, FREE, FREE, encoding=encoding)
    engine.set_kv_listener(hub.put)
    query = {"model_name": encoding}
    try:
        early = [3 + i for i in range(2 * size)]
        await generate(engine, [*early, 1])  # before the indexer listens: it asks for a replay
        indexer.post(
            "/register",
            instance_id=instance,
            endpoint=publisher.endpoint,
            replay_endpoint=publisher.replay_endpoint,
            model_name=encoding,
            block_size=size,
            dp_rank=0,
        )
        await asyncio.sleep(1)  # its subscription is on its way
        longer = [*early, *range(9, 9 + size)]
        await generate(engine, [*longer, 1])
        indexer.expect([*longer, 5, 6, 7], 3 * size, **query)
        indexer.expect(early, 2 * size, **query)
        indexer.expect([*early, *[1] * size], 2 * size, **query)
        indexer.expect([1] * size, 0, **query)
        if encoding == "map":  # of arrays it reads only salts that its own front end has tagged
            other = [70 + i for i in range(2 * size)]
            await generate(engine, [*other, 1], cache_salt="tenant")
            indexer.expect(other, 2 * size, cache_salt="tenant", **query)
            indexer.expect(other, 0, **query)
        for number in range(30, 42):  # evicts all that came before
            await generate(engine, [number] * 80)
        indexer.expect(longer, 0, **query)
        indexer.expect([41] * 80, 80 // size * size, **query)
        await engine.clear_prefix_cache()
        indexer.expect([41] * 80, 0, **query)
    finally:
        engine.close()
        publisher.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter with ai-dynamo-runtime")
    python = parser.parse_args().python
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if others:
        raise SystemExit(f"the indexer would be open to {others}; run this as the text above says")
    with tempfile.TemporaryDirectory() as name:
        folder = checkpoints.write_tiny(Path(name) / "tiny")
        indexer = Indexer(python, Path(name))
        try:
            for instance, encoding in enumerate(ENCODINGS):
                asyncio.run(check(indexer, folder, instance, encoding))
        finally:
            indexer.process.close()
    print("the indexer's answers are right")


if __name__ == "__main__":
    main()
