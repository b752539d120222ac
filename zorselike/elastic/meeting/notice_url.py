"""A cloud's word that it will take this machine back, from its metadata server.

Known answers of "not yet":

- AWS (`http://169.254.169.254/latest/meta-data/spot/instance-action`) has no such page.
- Google Cloud (`http://metadata.google.internal/computeMetadata/v1/instance/preempted`) says FALSE, or NONE
  as `maintenance-event`.
- Azure (`http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01`) lists no event.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

from zorselike.errors import ConfigError

EVERY_S = 5.0
_LIMIT_S = 2.0
_MAX_BYTES = 1 << 16
_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
"""Google's and Azure's servers want their own one; the others pass over it."""
_TOKEN = "X-aws-ec2-metadata-token"
_TOKEN_S = 21600
_NOT_YET = ("", "FALSE", "NONE")

logger = logging.getLogger(__name__)


class NoticeUrl:
    """Asks every few seconds, in a thread, until the answer is a notice."""

    def __init__(self, url: str, then: Callable[[], object], *, every_s: float = EVERY_S) -> None:
        """`then`: called once, in that thread, when there is a notice. Raises `ConfigError` for what is no
        URL."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"ZORSELIKE_NOTICE_URL is '{url}'; give the http address of the cloud's metadata server"
            )
        self._url, self._then, self._every_s = url, then, every_s
        self._token_url = urllib.parse.urlunsplit((parts.scheme, parts.netloc, "/latest/api/token", "", ""))
        self._token: str | None = None
        # A metadata server is this machine's own, whatever proxy leads out of it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="elastic notice url", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not is_notice(self._ask()):
            time.sleep(self._every_s)
        self._then()

    def _ask(self) -> str | None:
        """The page, None where there is none."""
        try:
            return self._read()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            reason = f"HTTP {error.code}"
            if error.code == 401:
                self._token = self._fetch_token()
                reason = "" if self._token else reason
        except OSError as error:
            reason = str(error)
        if reason and not self._has_warned:
            self._has_warned = True
            logger.warning("no notice can be read from %s (%s); asked again", self._url, reason)
        return None

    def _read(self) -> str:
        headers = {**_HEADERS, **({_TOKEN: self._token} if self._token else {})}
        request = urllib.request.Request(self._url, headers=headers)
        with self._opener.open(request, timeout=_LIMIT_S) as answer:
            return answer.read(_MAX_BYTES).decode(errors="replace")  # type: ignore[no-any-return]

    def _fetch_token(self) -> str | None:
        """AWS's second version of the service answers to nobody without one."""
        headers = {f"{_TOKEN}-ttl-seconds": str(_TOKEN_S)}
        request = urllib.request.Request(self._token_url, headers=headers, method="PUT")
        try:
            with self._opener.open(request, timeout=_LIMIT_S) as answer:
                return answer.read(_MAX_BYTES).decode().strip() or None
        except (OSError, UnicodeDecodeError):
            return None


def is_notice(page: str | None) -> bool:
    """Whether an answer says that the machine will be taken back."""
    if page is None or page.strip().upper() in _NOT_YET:
        return False
    try:
        table = json.loads(page)
    except ValueError:
        return True
    return not (isinstance(table, dict) and "Events" in table) or bool(table["Events"])
