"""The page: its numbers are the simulator's, it needs no network, and a browser opens it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from handmade import CLUSTER, GIB, make_case, make_simulation, make_spans

from zorselike.errors import ConfigError
from zorselike.simulator.html.document import save_page
from zorselike.simulator.html.found import FoundPlan, Search
from zorselike.simulator.report.limits import find_link_shares
from zorselike.simulator.simulated_plan import Baseline, SimulatedPlan

SPEEDS = (2.0, 0.5, 0.5)
LINKS = {"node a, out": 4e9, "node b, in": 4e9, "node b, device 0, out": 1e9, "node b, device 1, in": 0.0}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class _Scripts(HTMLParser):
    """What scripts and other files a page has."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.json: list[str] = []
        self._is_json = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.fetched += [str(found[key]) for key in ("src", "href") if found.get(key)]
        self._is_json = tag == "script" and found.get("type") == "application/json"

    def handle_data(self, data: str) -> None:
        if self._is_json:
            self.json.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._is_json = False


def make_step() -> SimulatedPlan:
    return make_case(make_simulation(bytes_by_link=LINKS, cost=2.0))


def make_baselines() -> list[Baseline]:
    slower = make_case()
    slower = replace(slower, simulation=replace(slower.simulation, iteration_s=15.0))
    return [
        Baseline(name="1 x A100-40 alone", how="1 rank", simulated=slower),
        Baseline(name="even <shares>", how="", simulated=None, reason="nothing fits"),
    ]


def make_page(path: Path, case: SimulatedPlan | None = None, **more: Any) -> str:
    pytest.importorskip("bokeh", reason="Bokeh is not installed (pip install 'zorselike[html]')")
    case = case or make_step()
    save_page(case, path, baselines=make_baselines(), speeds=SPEEDS, ideal_s=4.0, notes=["a note"], **more)
    return path.read_text()


def read_columns(page: str) -> dict[str, dict[str, list[Any]]]:
    """The tables that the page's figures are drawn from, by name."""
    found: dict[str, dict[str, list[Any]]] = {}
    (embedded,) = re.findall(r"const docs_json = '(.*?)';\n", page)
    document = json.loads(json.loads(f'"{embedded}"') if "\\\\" in embedded else embedded)
    for part in _walk(document):
        if part.get("name") == "ColumnDataSource" and part["attributes"].get("name"):
            entries = part["attributes"]["data"]["entries"]
            found[part["attributes"]["name"].removesuffix(" data")] = dict(entries)
    return found


def _walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner)


def test_numbers_are_the_simulator_s(tmp_path: Path) -> None:
    case = make_step()
    page = make_page(tmp_path / "p.html", case)
    columns = read_columns(page)
    cards, times, timeline, links = (columns[name] for name in ("cards", "time", "timeline", "links"))
    assert cards["rank"] == [0, 1, 2] and cards["speed"] == list(SPEEDS)
    assert cards["memory"] == pytest.approx([size / GIB for size in case.peak_bytes])
    assert cards["limit"] == [40, 16, 16] and cards["rows"] == [4, 2, 2] and cards["layers"] == [1, 1, 1]
    seconds = dict(zip(zip(times["rank"], times["what"], strict=True), times["seconds"], strict=True))
    for rank, spent in enumerate(case.simulation.ranks):
        assert seconds[rank, "computing"] == spent.busy_s
        assert seconds[rank, "communication that nothing hides"] == spent.exposed_communication_s
        assert sum(value for (own, _), value in seconds.items() if own == rank) == case.simulation.iteration_s
    assert sorted(
        zip(timeline["rank"], timeline["start"], timeline["stop"], timeline["action"], strict=True)
    ) == sorted((span.rank, span.start_s, span.stop_s, span.action.text) for span in case.simulation.spans)
    assert dict(zip(links["link"], links["share"], strict=True)) == {
        name: pytest.approx(share) for name, share in find_link_shares(case).items() if LINKS[name]
    }
    for text in (
        "10 s",
        "40",
        "40.0%",
        "2 USD",
        "50%",
        "plan is 1.50 x as fast (1 rank)",
        "even &lt;shares&gt;",
    ):
        assert text in page


def test_a_page_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    page = make_page(tmp_path / "p.html")
    parser = _Scripts()
    parser.feed(page)
    assert parser.fetched == []
    assert "cdn.bokeh.org" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert len(page) < 3e6


def test_a_search_is_a_curve_beside_baselines_and_the_bound(tmp_path: Path) -> None:
    assert "search" not in read_columns(make_page(tmp_path / "p.html"))
    found = [FoundPlan(0.5, 12.0, 3), FoundPlan(2.0, 10.0, 7)]
    page = make_page(tmp_path / "p.html", search=Search(found=found, end_s=5.0, bound_s=8.0))
    columns = read_columns(page)["search"]
    assert columns["elapsed"] == [0.5, 2.0, 5.0] and columns["step"] == [12.0, 10.0, 10.0]
    assert "proven: no plan takes less" in page and "1 x A100-40 alone" in page


def test_many_short_actions_are_told_to_be_joined(tmp_path: Path) -> None:
    spans = make_spans([(0, "compute", i / 5000, (i + 1) / 5000, "0F0") for i in range(50_000)])
    page = make_page(tmp_path / "p.html", make_case(make_simulation(spans=spans)))
    assert "50,000 actions are drawn as" in page and len(page) < 5e6


def test_cards_that_a_plan_leaves_out_are_on_the_map(tmp_path: Path) -> None:
    case = make_step()
    more = replace(CLUSTER, nodes=(*CLUSTER.nodes, replace(CLUSTER.nodes[0], name="c", zone="z")))
    page = make_page(tmp_path / "p.html", replace(case, cluster=more))
    assert "not used by the plan" in page and '"z"' in page


def test_without_bokeh_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(ConfigError, match=r"pip install 'zorselike\[html\]'"):
        save_page(make_case(), tmp_path / "p.html", baselines=(), speeds=SPEEDS, ideal_s=4.0)
    assert not list(tmp_path.iterdir())


PROBE = """
<script>
function probe() {
  const page = window.Bokeh && Bokeh.documents[0];
  if (!page || !page.is_idle) { setTimeout(probe, 50); return; }
  const read = (name, column) => Array.from(page.get_model_by_name(name + " data").data[column]);
  const found = {seconds: read("time", "seconds"), memory: read("cards", "memory")};
  found.stop = read("timeline", "stop");
  const told = document.createElement("pre");
  told.id = "probe";
  told.textContent = JSON.stringify(found);
  document.body.append(told);
}
probe();
</script>
"""
"""What the browser holds once everything is drawn, as text in the page."""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_draws_every_figure_with_the_simulator_s_numbers(tmp_path: Path) -> None:
    case, path = make_step(), tmp_path / "p.html"
    search = Search(found=[FoundPlan(0.5, 12.0, 3)], end_s=5.0, bound_s=8.0)
    path.write_text(make_page(path, case, search=search).replace("</body>", f"{PROBE}</body>"))
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=20000", "--dump-dom"]
    ran = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    said = [line.partition("CONSOLE")[2] for line in ran.stderr.splitlines() if "CONSOLE" in line]
    assert [line for line in said if "setting log level" not in line and "document idle" not in line] == []
    assert ran.stdout.count('class="bk-Figure"') == 6 and ran.stdout.count('class="bk-Row"') == 1
    (told,) = re.findall(r'<pre id="probe">(.*?)</pre>', ran.stdout)
    found = json.loads(told)
    spent = case.simulation.ranks
    assert found["seconds"][0::4] == [times.busy_s for times in spent]
    assert found["seconds"][1::4] == [times.waiting_for_data_s for times in spent]
    assert found["memory"] == pytest.approx([size / GIB for size in case.peak_bytes])
    assert sorted(found["stop"]) == sorted(span.stop_s for span in case.simulation.spans)
