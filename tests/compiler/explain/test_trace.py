"""What tlparse and TORCH_LOGS show of the compiler."""

from __future__ import annotations

import json
import logging

import torch

from tests.graphs import MLP, rewritten


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.artifacts: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        artifact = getattr(record, "metadata", {}).get("artifact")
        if artifact:
            self.artifacts[artifact["name"]] = record.payload  # type: ignore[attr-defined]


def test_report_and_graphs_are_artifacts_of_the_structured_trace() -> None:
    log, kept = logging.getLogger("torch.__trace"), _Kept()
    level = log.level
    log.addHandler(kept)
    log.setLevel(logging.DEBUG)
    try:
        rewritten(MLP(), torch.randn(32, 64), recipe="nvfp4")
    finally:
        log.removeHandler(kept)
        log.setLevel(level)
    assert {"fp4_report", "fp4_captured", "fp4_rewritten"} <= set(kept.artifacts)
    report = json.loads(kept.artifacts["fp4_report"])
    assert [x["name"] for x in report["linears"]] == ["a", "b", "c"]
    assert "fp4." not in kept.artifacts["fp4_captured"]
    assert "# a fprop" in kept.artifacts["fp4_rewritten"]
    assert "# a.weight" in kept.artifacts["fp4_rewritten"]


def test_torch_logs_takes_fp4() -> None:
    """Our loggers are below that name, which is that of an importable module, as TORCH_LOGS wants."""
    parse = torch._logging._internal._parse_log_settings
    assert parse("fp4").log_qname_to_level["fp4"] == logging.INFO
    assert parse("+fp4").log_qname_to_level["fp4"] == logging.DEBUG
    ours = [n for n in logging.root.manager.loggerDict if n.startswith("fp4.")]
    assert {"fp4.report", "fp4.pipeline"} <= set(ours)
