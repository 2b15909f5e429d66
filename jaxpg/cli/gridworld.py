"""`jaxpg gridworld`: a grid world in the browser, served on this machine only or written as one file."""

from __future__ import annotations

import argparse
import errno
import sys
import threading
import webbrowser
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jaxpg import files
from jaxpg.errors import UserError
from jaxpg.user_input.printable import printable

HOST = "127.0.0.1"


def run_gridworld(arguments: argparse.Namespace) -> int:
    """Write the page, or serve it until Ctrl-C."""
    from jaxpg.report.gridworld import gridworld_page

    page = gridworld_page()
    if arguments.out is not None:
        _write(page, arguments.out)
        return 0
    server = make_server(page, arguments.port)
    address = f"http://{HOST}:{server.server_port}/"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        print(f"The grid world is at {address}\nCtrl-C ends it.", flush=True)
        if arguments.browser and not _open_browser(address):
            print(f"jaxpg: no browser could be opened; open {address} in one.", file=sys.stderr, flush=True)
        _wait()
    except KeyboardInterrupt:
        print()
    finally:
        server.shutdown()
        server.server_close()
    return 0


def make_server(page: str, port: int) -> ThreadingHTTPServer:
    """A server of the page on the loopback address; port 0 is any free one.

    Raises:
        UserError: the port is in use, out of range, or may not be used.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"--port must be between 0 and 65535, not {port}.")
    content = page.encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Requests are not news."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"Port {port} is in use. Choose another with --port, or --port 0 for any free one."
            ) from error
        raise UserError(f"Port {port} cannot be used ({error.strerror}). Choose another with --port.") from error


def _wait() -> None:
    """Until Ctrl-C."""
    threading.Event().wait()


def _open_browser(address: str) -> bool:
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False


def _write(page: str, path: Path) -> None:
    if path.is_dir():
        raise UserError(f"--out must be a file, such as {path / 'gridworld.html'}, and {path} is a directory.")
    try:
        files.replace_file(path, page)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--out: {path} cannot be written ({reason}). Choose a directory that exists.") from error
    print(printable(f"Wrote {path}. Open it in a browser."))
