"""Responses that can be fetched, cancelled and continued later: in memory, bounded, per client.

The least recently used go first. A client is whoever sends the same key; for it nobody
else's responses exist. Never on disk. Made and used by responses.py.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.errors import BadField, NotFound
from serving.http.responses_events import ResponseWriter

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20  # of JSON text
MAX_TURNS = 256
OVERHEAD = 4096  # bytes of a response without what clients put into it


@dataclass(frozen=True, slots=True)
class Stored:
    """One finished response and the input items that it answered (without earlier turns)."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    size: int


class ResponseStore:
    """Stored responses by owner and id, the least recently used first.

    Args:
        max_responses, max_bytes: what is held at most, of all owners together.

    Attributes:
        running: engine request id and writer of each response that is being made, by owner and id.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.size = 0
        self.running: dict[tuple[str, str], tuple[str, ResponseWriter]] = {}
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def put(
        self, owner: str, response: dict[str, Any], items: list[dict[str, Any]], size: int
    ) -> bool:
        """Keep a response; False if it is larger than all that may be kept.

        Args:
            size: bytes of `items` and of what the response repeats of the request, as JSON.
        """
        size += OVERHEAD + len(json.dumps(response["output"]))
        if previous := self._stored.pop((owner, response["id"]), None):
            self.size -= previous.size
        if size > self._max_bytes:
            return False
        self._stored[owner, response["id"]] = Stored(response, items, size)
        self.size += size
        while len(self._stored) > self._max_responses or self.size > self._max_bytes:
            self.size -= self._stored.popitem(last=False)[1].size
        return True

    def get(self, owner: str, response_id: str) -> Stored:
        """The response. Raises NotFound."""
        stored = self._stored.get((owner, response_id))
        if stored is None:
            raise NotFound(f"response_id={response_id!r:.100} does not exist, or is no longer kept")
        self._stored.move_to_end((owner, response_id))
        return stored

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Raises NotFound."""
        self.get(owner, response_id)
        self.size -= self._stored.pop((owner, response_id)).size

    def history(self, owner: str, response_id: str | None) -> list[dict[str, Any]]:
        """Input and output items of a response and of those that it continued, the oldest first.

        Raises BadField if one of them is no longer kept, or if there are more than MAX_TURNS.
        """
        turns: list[Stored] = []
        while response_id is not None:
            try:
                turns.append(self.get(owner, response_id))
            except NotFound as error:
                text = str(error).replace("response_id", "previous_response_id", 1)
                raise BadField("previous_response_id", f"{text}; send all items as input") from None
            if len(turns) > MAX_TURNS:
                raise BadField(
                    "previous_response_id",
                    f"previous_response_id continues more than {MAX_TURNS} responses; send all "
                    "items as input",
                )
            response_id = turns[-1].response["previous_response_id"]
        return [item for t in reversed(turns) for item in (*t.items, *t.response["output"])]


def owner_of(headers: Mapping[str, str]) -> str:
    """Who may see a response: a digest of the credentials (one owner where no key is asked for)."""
    parts = [headers.get("authorization"), headers.get("x-api-key")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
