"""How long hosts take to send each other, over plain TCP, the fewest bytes that an all_reduce must move: as JSON.

usage: plain_tcp.py REPETITIONS BYTES...    (as a rank; one of each host does the work, over one stream for each rank)
"""

import json
import os
import socket
import sys
import threading
import time


def take(stream, count):
    """Receives `count` bytes and drops them."""
    room = memoryview(bytearray(min(count, 1 << 20)))
    while count > 0:
        count -= stream.recv_into(room[:count])


def connect(own, addresses, port, streams):
    """Several connections between every two hosts: {host: [sockets]}."""
    found = {}
    with socket.create_server((addresses[own], port), backlog=64) as server:
        for host in range(own):
            found[host] = []
            while len(found[host]) < streams:
                try:
                    stream = socket.create_connection((addresses[host], port))
                except ConnectionRefusedError:
                    time.sleep(0.05)
                    continue
                stream.sendall(bytes([own]))
                found[host].append(stream)
        while sum(map(len, found.values())) < streams * (len(addresses) - 1):
            stream = server.accept()[0]
            found.setdefault(stream.recv(1)[0], []).append(stream)
    for streams_of_host in found.values():
        for stream in streams_of_host:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def tell_all(streams, text):
    """Each host's text of 32 bytes, once all have come here."""
    for of_host in streams.values():
        of_host[0].sendall(text.ljust(32).encode())
    return [of_host[0].recv(32, socket.MSG_WAITALL).decode().strip() for of_host in streams.values()]


def exchange(streams, bytes_per_stream):
    data = bytes(bytes_per_stream)
    work = []
    for of_host in streams.values():
        for stream in of_host:
            work.append(threading.Thread(target=take, args=(stream, bytes_per_stream)))
            work.append(threading.Thread(target=stream.sendall, args=(data,)))
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()


def main():
    addresses = os.environ["BENCH_ADDRESSES"].split(",")
    own, count = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    streams = connect(own, addresses, int(os.environ["MASTER_PORT"]) + 1, count)
    table = {}
    for size in sys.argv[2:]:
        times = []
        for _ in range(int(sys.argv[1])):
            tell_all(streams, "")
            begin = time.perf_counter()
            exchange(streams, 2 * int(size) // len(addresses) // count)
            took = (time.perf_counter() - begin) * 1e6
            times.append(max([took, *map(float, tell_all(streams, f"{took:.1f}"))]))
        table[size] = sorted(times)[len(times) // 2]
    if own == 0:
        print(json.dumps({"plain TCP": table}))


if os.environ["LOCAL_RANK"] == "0":
    main()
