"""Transports by the names that operators use."""

from __future__ import annotations

from paceline.cluster.transfer.cuda_ipc import CudaIpcTransport
from paceline.cluster.transfer.nixl import NixlTransport
from paceline.cluster.transfer.shared_memory import SharedMemoryTransport
from paceline.cluster.transfer.tcp import TcpTransport
from paceline.cluster.transfer.transport import Transport
from paceline.errors import ConfigError

TRANSPORTS = (SharedMemoryTransport.name, TcpTransport.name, CudaIpcTransport.name, NixlTransport.name)


async def open_transport(name: str, *, token: str = "", host: str = "127.0.0.1", port: int = 0,
                         advertised: str | None = None) -> Transport:
    """Ready to offer and to fetch; close() it. Only TCP looks at the options: TcpTransport says what they are."""
    if name == SharedMemoryTransport.name:
        return SharedMemoryTransport()
    if name == TcpTransport.name:
        listening = TcpTransport(token, host, port, advertised=advertised)
        await listening.start()
        return listening
    if name == CudaIpcTransport.name:
        return CudaIpcTransport()
    if name == NixlTransport.name:
        return NixlTransport()
    raise ConfigError(f"There is no transport {name!r} for blocks: use one of {', '.join(TRANSPORTS)}.")
