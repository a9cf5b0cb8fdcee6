"""Reads counters and gauges from a Prometheus text page."""

from __future__ import annotations

import http.client
import re

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? +(\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


class Metrics:
    """One reading of a /metrics page."""

    def __init__(self, page: str) -> None:
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for line in page.splitlines():
            if match := _SAMPLE.match(line):
                name, labels, value = match.groups()
                self._samples.append((name, dict(_LABEL.findall(labels or "")), float(value)))

    def names(self) -> set[str]:
        return {name for name, _, _ in self._samples}

    def items(self, prefix: str) -> list[tuple[str, dict[str, str], float]]:
        """All samples whose name begins with ``prefix``: name, labels, value."""
        return [sample for sample in self._samples if sample[0].startswith(prefix)]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of this name with these labels; 0 if there is none.

        A labelled counter has no sample before its first event, so that 0 is right for none;
        names() lists the names that exist.
        """
        return sum(
            value
            for sample, its_labels, value in self._samples
            if sample == name and labels.items() <= its_labels.items()
        )


def read_metrics(address: str, timeout_s: float = 60.0) -> Metrics:
    """Reads http://ADDRESS/metrics; ``address`` is HOST:PORT.

    Raises:
        OSError: no server responds there.
    """
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        body = response.read().decode()
    except http.client.HTTPException as error:
        # A server was killed during its response: the caller handles it like a closed port.
        raise ConnectionError(f"GET {address}/metrics: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ConnectionError(
            f"GET {address}/metrics: status {response.status}: {body.strip()[:200]}"
        )
    return Metrics(body)
