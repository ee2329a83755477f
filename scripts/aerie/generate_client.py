"""A plain client of SGLang's HTTP endpoints: one connection a thread, kept open."""

from __future__ import annotations

import http.client
import json
import select
import socket
import urllib.parse
from typing import Any


class ServerGone(Exception):
    """The server does not answer: it is down, starting, or it died with this request."""


class RequestTimeout(Exception):
    """No answer within the time; the server may still be working on it."""


class Client:
    """Not for use by two threads at once."""

    def __init__(self, url: str, timeout_s: float):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// address")
        self.url, self.host, self.port, self.timeout_s = url, parts.hostname, parts.port or 80, timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def request(self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> tuple[int, bytes]:
        """(status, body). Raises ServerGone or RequestTimeout; sends nothing twice."""
        timeout = timeout_s or self.timeout_s
        if self._connection is not None and was_closed(self._connection.sock):
            self.close()
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        connection = self._connection
        try:
            if connection.sock is not None:
                connection.sock.settimeout(timeout)
            connection.timeout = timeout
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
            if response.will_close:
                self.close()
            return response.status, data
        except (TimeoutError, socket.timeout):
            self.close()
            raise RequestTimeout(f"no answer from {self.url} within {timeout:g} s") from None
        except (OSError, http.client.HTTPException, OverflowError) as exc:  # OverflowError: a length that nothing can have
            self.close()
            raise ServerGone(f"{self.url}: {exc!r}") from None

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether /health answers 200 now."""
        try:
            return self.request("GET", "/health", timeout_s=timeout_s)[0] == 200
        except (ServerGone, RequestTimeout):
            return False


def was_closed(sock: socket.socket | None) -> bool:
    """Whether the other end closed a connection on which nothing is awaited: a server does that after some idle seconds (5 in SGLang's), and is no worse for it."""
    if sock is None:
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def read_answer(data: bytes) -> dict[str, Any]:
    """What /generate said with status 200. Raises ValueError with the end of a sentence about the server: it aborted the request, or that is no such answer."""
    try:
        answer = json.loads(data)
        reason = answer["meta_info"].get("finish_reason")
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        raise ValueError(f"gave an answer that /generate never gives: {error_text(data)!r}") from None
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise ValueError(f"aborted the request: {reason.get('message', 'no reason given')}")
    return answer


def error_text(data: bytes) -> str:
    """The message in an error answer, on one line and not endless."""
    try:
        content = json.loads(data)
        error = content.get("error", content)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, RecursionError, AttributeError):
        text = data.decode("utf-8", errors="replace")
    return " ".join(str(text).split())[:300]
