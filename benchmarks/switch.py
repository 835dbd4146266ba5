"""A switch between the hosts of `benchmarks.hosts`: passes on frames, loses some of them, or passes them on late.

    python switch.py NUM_PORTS

The ports are the interfaces `port0`, `port1`, ... of its network. Orders come as lines of JSON through the input; it
ends with it. A kernel could do the same (netem), but not all have what it needs.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import selectors
import socket
import sys
import time

_ALL_FRAMES = 3
_SOL_PACKET, _WITH_OFFLOADS, _OFFLOADS_BYTES = 263, 15, 10
_MOST_BYTES = 2**17


class Switch:
    """Knows at which port a host is since it has heard of it; until then all get its frames."""

    def __init__(self, num_ports: int) -> None:
        self._ports = []
        for number in range(num_ports):
            port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES))
            # With what is left to do for a network card: checksums, and the cutting into packets.
            port.setsockopt(_SOL_PACKET, _WITH_OFFLOADS, 1)
            port.bind((f"port{number}", 0))
            port.setblocking(False)
            self._ports.append(port)
        self._disturbance: dict[tuple[int, int], tuple[float, float]] = {}
        self._port_of: dict[bytes, int] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ)
        for port in self._ports:
            selector.register(port, selectors.EVENT_READ)
        orders = b""
        while True:
            due_in_s = max(self._late[0][0] - time.monotonic(), 0) if self._late else None
            for key, _ in selector.select(due_in_s):
                if key.fd != 0:
                    self._receive(self._ports.index(key.fileobj))  # type: ignore[arg-type]
                    continue
                received = os.read(0, _MOST_BYTES)
                if not received:
                    return
                *lines, orders = (orders + received).split(b"\n")
                for line in lines:
                    self._obey(**json.loads(line))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(self._late)
                self._send(target, frame)

    def _obey(self, *, loss: float, delay_s: float, source: int | None, target: int | None) -> None:
        ports = range(len(self._ports))
        for way in itertools.product(ports if source is None else [source], ports if target is None else [target]):
            self._disturbance[way] = (loss, delay_s)

    def _receive(self, source: int) -> None:
        try:
            frame, (_, _, packet_type, _, _) = self._ports[source].recvfrom(_MOST_BYTES)
        except OSError:  # the port is down
            return
        if packet_type == socket.PACKET_OUTGOING:
            return
        ethernet = frame[_OFFLOADS_BYTES:]
        self._port_of[ethernet[6:12]] = source
        known = self._port_of.get(ethernet[:6])
        for target in [known] if known is not None else range(len(self._ports)):
            loss, delay_s = self._disturbance.get((source, target), (0.0, 0.0))
            if target == source or random.random() < loss:
                continue
            if delay_s:
                heapq.heappush(self._late, (time.monotonic() + delay_s, next(self._order), target, frame))
            else:
                self._send(target, frame)

    def _send(self, target: int, frame: bytes) -> None:
        try:
            self._ports[target].send(frame)
        except OSError:  # the port is down, or its queue full: a frame is lost, as on any switch
            return


if __name__ == "__main__":
    switch = Switch(int(sys.argv[1]))
    print(flush=True)
    switch.run()
