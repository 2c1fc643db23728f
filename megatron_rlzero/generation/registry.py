"""RUN_DIR/servers/: who asks to join a run from outside, a file NAME.json {"url": "http://host:port"} each."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from urllib.parse import urlsplit

from megatron_rlzero.config import Config
from megatron_rlzero.validation import ConfigError, is_loopback, is_server_url, is_unspecified

DIRECTORY = "servers"
#: seconds between two looks into the directory
LOOK_S = 1.0


def register(run_dir: str, name: str, host: str, port: int) -> Path:
    """Writes the file by which a server asks to join.

    Raises:
        ConfigError: a name that is no file's, or another's; a host that is no address.
    """
    path = Path(run_dir, DIRECTORY, f"{name}.json")
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if path.name != f"{name}.json" or not name.strip(".") or name.startswith("."):
        raise ConfigError([f"--join = {name}: no name of a file; give letters and digits"])
    if is_unspecified(host):
        raise ConfigError([f"--host = {host}: every address of this machine; give the one that the run reaches it by"])
    if path.exists() and json.loads(path.read_text()) != {"url": url}:
        raise ConfigError([f"--join = {name}: {path} is another server's; choose another name, or remove the file"])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"url": url}) + "\n")
    return partial.replace(path)


class Registry:
    """Files that cannot be used are named once and ignored until they change."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.directory = Path(config.run_dir) / DIRECTORY
        self.directory.mkdir(parents=True, exist_ok=True)
        self.looked = -math.inf
        self.files: dict[str, tuple[tuple[int, int], str]] = {}  # NAME -> (time and size, URL or nothing)
        self.warned: set[tuple[str, str]] = set()

    def look(self) -> dict[str, str]:
        """NAME -> URL of all that are there; not newer than LOOK_S."""
        if time.monotonic() - self.looked >= LOOK_S:
            self.looked = time.monotonic()
            self._read()
        return {name: url for name, (_, url) in self.files.items() if url}

    def warn(self, name: str, text: str) -> None:
        """Says once why a file is ignored."""
        if (name, text) not in self.warned:
            self.warned.add((name, text))
            print(f"{self.directory / name}.json is ignored: {text}", flush=True)

    def _read(self) -> None:
        files = {}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                name, suffix = os.path.splitext(entry.name)
                if suffix != ".json":
                    continue
                try:
                    stat = entry.stat()
                    stamp = stat.st_mtime_ns, stat.st_size
                    known = self.files.get(name)
                    files[name] = known if known and known[0] == stamp else (stamp, self._url(name, Path(entry.path)))
                except FileNotFoundError:  # removed since
                    continue
        self.files = files

    def _url(self, name: str, path: Path) -> str:
        """The file's URL; empty, with a warning, where the run cannot use it."""
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            url = json.loads(text)["url"].rstrip("/")
        except (ValueError, KeyError, TypeError, AttributeError):
            self.warn(name, f'it says {text[:100]!r}; write {{"url": "http://host:port"}}')
            return ""
        if not is_server_url(url):
            self.warn(name, f"{url!r} is not the address of a server; write http://host:port")
            return ""
        if is_loopback(urlsplit(url).hostname):
            return url
        if not self.config.rollout.token_file:
            self.warn(name, f"{url} is not on this machine's loopback, and rollout.token_file is not set")
            return ""
        if self.config.refit.interface == "lo":
            self.warn(name, f"{url} cannot be reached over refit.interface = lo")
            return ""
        return url
