"""One connection of a client, which may neither dawdle over the head of a request nor keep others out.

uvicorn waits for the rest of a head for ever, and takes connections until no file descriptor is left.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, cast
from weakref import WeakKeyDictionary

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

HEAD_S = 10.0  # from the begin of a connection, or from the last answer, to the end of a head
SWEEP_S = 1.0
RESERVED = 256  # file descriptors for all that is no connection
MOST_PLACES = 8192  # each costs some 20 kB
MOST_HELD = 64 << 10  # bytes: beyond, a client that does not read has to hold up who writes
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Places:
    """The places of one server, and who of those that hold one owes a part of a request, the longest first."""

    def __init__(self) -> None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = MOST_PLACES if most == resource.RLIM_INFINITY else max(1, min(MOST_PLACES, most - RESERVED))
        self._owing: dict[Connection, float] = {}  # since when, on the clock of the loop
        self._is_sweeping = False

    def note(self, connection: Connection, loop: asyncio.AbstractEventLoop, *, is_owing: bool) -> None:
        if not is_owing:
            self._owing.pop(connection, None)
        elif connection not in self._owing:
            self._owing[connection] = loop.time()
            self._sweep_later(loop)

    def make_room(self) -> bool:
        """Take the place of who has owed for longest; False when nobody owes anything."""
        for connection in self._owing:
            del self._owing[connection]
            connection.leave()
            return True
        return False

    def _sweep_later(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer for all connections: one for each would be set and cancelled with every request."""
        if not self._is_sweeping:
            self._is_sweeping = True
            loop.call_later(SWEEP_S, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """End connections whose head takes too long. A body that is read has a time of its own, in the front."""
        self._is_sweeping = False
        latest = loop.time() - HEAD_S
        late = [one for one, since in self._owing.items() if since < latest and one.is_awaited_by_nobody]
        for connection in late:
            del self._owing[connection]
            connection.leave()
        if self._owing:
            self._sweep_later(loop)


class Joined:
    """A transport that sends what is written in one turn of the event loop together.

    uvicorn writes the head and the body of an answer apart; two system calls cost as much as finding the answer again.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = bytearray()

    def write(self, data: bytes) -> None:
        if data and not self._held:
            self._loop.call_soon(self._flush)
        self._held += data
        if len(self._held) > MOST_HELD:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        held, self._held = self._held, bytearray()
        if held:
            self._transport.write(held)


PLACES: WeakKeyDictionary[ServerState, Places] = WeakKeyDictionary()


class Connection(H11Protocol):
    """When all places are taken, who has owed the rest of a request for longest loses the place to who comes."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._places = PLACES.setdefault(self.server_state, Places())

    @property
    def is_awaited_by_nobody(self) -> bool:
        """It owes a head, or the rest of a body that was answered without it."""
        is_answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
        return self.conn.their_state is h11.IDLE or (self.conn.their_state is h11.SEND_BODY and is_answered)

    def leave(self) -> None:
        self.connections.discard(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        if len(self.connections) < self._places.most or self._places.make_room():
            super().connection_made(transport)
            self.transport = cast("asyncio.Transport", Joined(transport, self.loop))
            self._note()
        else:
            self.transport = transport
            transport.write(FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.note(self, self.loop, is_owing=False)
        super().connection_lost(exc)

    def _note(self) -> None:
        is_owing = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()
        self._places.note(self, self.loop, is_owing=is_owing)
