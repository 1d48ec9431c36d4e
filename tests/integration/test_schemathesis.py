"""`schemathesis`, which makes its requests from our OpenAPI document: right, wrong and odd ones.

None of at least CASES requests may get a 5xx, and afterwards the server is as it was.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.integration.processes import Served

pytestmark = pytest.mark.clients
CASES = 2000
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


@pytest.fixture
def server(tiny: Path, serve) -> Served:
    """Answers are short, as most of the fuzzed requests set no limit."""
    flags = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--page-size", "16")
    return serve(tiny, "--served-model-name", "tiny", "--max-model-len", "64", *flags).wait_ready()


def completion(server: Served) -> str:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_no_request_that_the_document_allows_or_not_breaks_the_server(
    server: Served, clients: Path, tmp_path: Path
):
    before = completion(server)
    done = subprocess.run(
        [clients / "schemathesis", "run", f"{server.url}/openapi.json", "--checks", CHECKS,
         "--phases", "examples,coverage,fuzzing", "--max-examples", "20", "--seed", "1",
         "--workers", "2", "--no-shrink", "--continue-on-failure", "--suppress-health-check", "all",
         "--warnings", "off", "--report", "json", "--report-json-path", "report.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{server.output()[-3000:]}"
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["complete"] and report["operations"]["tested"] == report["operations"]["total"]
    assert report["test_cases"]["generated"] >= CASES
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        rates = report["valid_rates"][f"POST {route}"]["coverage"]
        assert rates["accepted"] > 50, f"{route}: too few got past the first check: {rates}"
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/load").json()["server_load"] == 0
    assert completion(server) == before
    assert "Traceback" not in server.output()
