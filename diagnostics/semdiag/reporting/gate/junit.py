"""The verdicts of a check as JUnit XML, which CI systems display."""

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from semdiag.reporting.gate.verification import Verification

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(result: Verification) -> str:
    """Return a test case for each pair, layer gate, invariant, rule and model, and changed number."""
    cases = list(_cases(result))
    failures = sum(failure is not None for _, _, failure in cases)
    new = result.compared.new if result.compared else ()
    counts = {"tests": str(len(cases) + len(new)), "failures": str(failures), "skipped": str(len(new))}
    suite = ElementTree.Element("testsuite", {"name": "semdiag check", **counts})
    for group, name, failure in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=f"semdiag.{group}", name=_clean(name))
        if failure is not None:
            ElementTree.SubElement(case, "failure", message=_clean(failure))
    for model in new:
        case = ElementTree.SubElement(suite, "testcase", classname="semdiag.baseline", name=_clean(model))
        ElementTree.SubElement(case, "skipped", message="not in the baseline")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _cases(result: Verification) -> Iterator[tuple[str, str, str | None]]:
    """Yield group, name, and failures of everything judged."""
    for pair in result.pairs:
        yield "pair", pair.pair.label, None if pair.passed else pair.fault
    for gate in result.layers:
        yield "layers", gate.label, None if gate.passed else gate.fault
    for invariant in result.invariants:
        yield "invariant", invariant.name, None if invariant.passed else invariant.words
    for rule in result.rules:
        yield "rule", f"{rule.rule.text}: {rule.model}", None if rule.passed else rule.fault
    if result.compared and not result.drifts:
        yield "baseline", "nothing has drifted", None
    for moved in result.drifts:
        yield "baseline", f"{moved.model}: {moved.quantity}", moved.words


def _clean(text: str) -> str:
    return _NOT_IN_XML.sub("?", text)
