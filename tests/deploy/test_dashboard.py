"""The Grafana dashboard asks for metrics and labels that the server has, and forgets none of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from forerun.engine.regret import ChoiceAccount, SpeculationReport
from forerun.engine.speculation import FixedLength
from tests.server.served import PROMPT, chat_llm, served

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/forerun.json").read_text())
DATASOURCE = yaml.safe_load((DEPLOY / "grafana/datasource.yaml").read_text())["datasources"][0]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]

MEMBERS = [{"method": "ngram", "min_draft_tokens": 2}, {"method": "suffix"}]
HYBRID = {"method": "hybrid", "num_speculative_tokens": 4, "drafters": MEMBERS}
FUNCTIONS = {"sum", "max", "rate", "histogram_quantile"}
FROM_SCRAPING = {"job", "instance"}  # labels that Prometheus adds
GROUPING = re.compile(r"\bby \(([^)]*)\)")
NAME = re.compile(r"[a-zA-Z_:][\w:]*")


@pytest.fixture(scope="module")
def exposed():
    """The labels of every sample of a server whose hybrid has drafted, by the sample's name; its control reports."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 64, "ignore_eos": True}
    report = SpeculationReport(tokens_per_second=3.0, plain_tokens_per_second=2.0, best_static_length=2, regret=0.1)
    with pytest.MonkeyPatch.context() as patch, served(chat_llm(HYBRID)) as server:
        patch.setattr(FixedLength, "choices", lambda _: ChoiceAccount())
        patch.setattr(ChoiceAccount, "report", lambda _: report)
        server.post("/v1/completions", body)
        text = server.send("GET", "/metrics")[2]
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def metrics_of(expression):
    """{name of a metric in a PromQL expression: labels that its matchers name}."""
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", GROUPING.sub("", expression))
    found = re.findall(r"([a-zA-Z_:][\w:]*)(\{[^}]*\})?", bare)
    return {name: set(NAME.findall(matchers)) for name, matchers in found if name not in FUNCTIONS}


def grouping_of(expression):
    return {label for labels in GROUPING.findall(expression) for label in NAME.findall(labels)}


def test_names_are_read_out_of_promql():
    expression = 'histogram_quantile(0.9, sum by (le, x) (rate(a:b_bucket{m=~"$c", n="d"}[$__rate_interval]))) / max(e)'
    assert metrics_of(expression) == {"a:b_bucket": {"m", "n"}, "e": set()}
    assert grouping_of(expression) == {"le", "x"}


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{title}-{t['refId']}" for title, t in TARGETS])
def test_a_panel_asks_for_what_the_server_has(exposed, title, target):
    asked = metrics_of(target["expr"])
    assert asked
    for name, labels in asked.items():
        assert name in exposed, f"{title}: the server has no {name}"
        assert labels <= exposed[name] | FROM_SCRAPING, f"{title}: {name} has no label {labels - exposed[name]}"
        assert grouping_of(target["expr"]) <= exposed[name], f"{title}: {name} cannot be grouped so"
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouping_of(target["expr"])


def test_every_metric_on_speculation_has_a_panel(exposed):
    asked = {name for _, target in TARGETS for name in metrics_of(target["expr"])}
    ours = {name for name in exposed if name.startswith("forerun:") or "spec_decode" in name}
    assert ours <= asked


def test_the_models_to_choose_from_are_those_of_a_metric(exposed):
    (variable,) = DASHBOARD["templating"]["list"]
    metric, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]["query"]).groups()
    assert label in exposed[metric]
    assert all(f"${name}" == "$model" for name in re.findall(r'"\$(\w+)"', json.dumps(TARGETS)))


def test_everything_is_asked_of_the_datasource_that_is_provided():
    used = [target["datasource"] for _, target in TARGETS] + [panel["datasource"] for panel in PANELS]
    used.append(DASHBOARD["templating"]["list"][0]["datasource"])
    assert all(source == {"type": DATASOURCE["type"], "uid": DATASOURCE["uid"]} for source in used)
