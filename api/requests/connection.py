"""Limits for connections that are slow to send a request: a deadline, and the oldest one is dropped in a full server.

uvicorn waits forever for the rest of a head, and accepts connections until no file descriptor is left (decision 0020).
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any
from weakref import WeakKeyDictionary

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

HEAD_S = 10.0  # to send a head, from the start of the connection or from the last response
CHECK_EVERY_S = 1.0
RESERVED = 256  # file descriptors for everything but connections
MOST_CONNECTIONS = 8192  # each takes about 20 kB
MOST_FIELDS = 200  # in a head: many small fields take longer to parse than their size suggests
TOO_MANY_FIELDS = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class ConnectionLimit:
    """The connections of one server that have not yet sent a whole request, the oldest first."""

    def __init__(self) -> None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_unlimited = most == resource.RLIM_INFINITY
        self.most = MOST_CONNECTIONS if is_unlimited else max(1, min(MOST_CONNECTIONS, most - RESERVED))
        self._unfinished: dict[Connection, float] = {}  # start time, on the clock of the loop
        self._is_scheduled = False

    def update(self, connection: Connection, loop: asyncio.AbstractEventLoop, *, is_unfinished: bool) -> None:
        if not is_unfinished:
            self._unfinished.pop(connection, None)
        elif connection not in self._unfinished:
            self._unfinished[connection] = loop.time()
            self._schedule(loop)

    def make_room(self) -> bool:
        """Drop the connection that has been unfinished for the longest time. Returns False if there is none."""
        for connection in self._unfinished:
            del self._unfinished[connection]
            connection.drop()
            return True
        return False

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedule one timer for all connections: one per connection would be set and cancelled with every request."""
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_later(CHECK_EVERY_S, self._drop_late, loop)

    def _drop_late(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop connections whose head is late. `Upload` limits the time of a body that is being read."""
        self._is_scheduled = False
        latest = loop.time() - HEAD_S
        late = [item for item, since in self._unfinished.items() if since < latest and item.is_unhandled]
        for connection in late:
            del self._unfinished[connection]
            connection.drop()
        if self._unfinished:
            self._schedule(loop)


LIMITS: WeakKeyDictionary[ServerState, ConnectionLimit] = WeakKeyDictionary()


class Connection(H11Protocol):
    """uvicorn's protocol with the limits above. Answers 503 if the server is full and no connection can be dropped."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limit = LIMITS.setdefault(self.server_state, ConnectionLimit())
        self._fields = 0  # lines of the head that is arriving

    @property
    def is_unhandled(self) -> bool:
        """Whether it waits for a head, or for the rest of a body that is already answered."""
        is_answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
        return self.conn.their_state is h11.IDLE or (self.conn.their_state is h11.SEND_BODY and is_answered)

    def drop(self) -> None:
        self.connections.discard(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        if len(self.connections) < self._limit.most or self._limit.make_room():
            super().connection_made(transport)
            self._update()
        else:
            self.transport = transport
            transport.write(FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE:
            self._fields += data.partition(b"\r\n\r\n")[0].count(b"\n")
            if self._fields > MOST_FIELDS:
                self.transport.write(TOO_MANY_FIELDS)
                self.transport.close()
                return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._fields = 0
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: any client can ask for a WebSocket, and gets an answer over HTTP/1.1."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.update(self, self.loop, is_unfinished=False)
        super().connection_lost(exc)

    def _update(self) -> None:
        is_receiving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        self._limit.update(self, self.loop, is_unfinished=is_receiving and not self.transport.is_closing())
