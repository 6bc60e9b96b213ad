"""Where others reach this host."""

import socket

_ELSEWHERE = {
    socket.AF_INET: "192.0.2.1",  # RFC 5737 and RFC 3849: addresses that nobody has; nothing is sent there, it is only routed
    socket.AF_INET6: "2001:db8::1",
}


def outward_address(family: socket.AddressFamily = socket.AF_INET) -> str | None:
    """This host's address on the way to others; None where there is no such way."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[family], 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None


def own_address() -> str:
    """The same; on a host without any such way, the loopback address."""
    return outward_address() or "127.0.0.1"
