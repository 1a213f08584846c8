"""The benchmark: what it prints adds up. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minispec.cli import main


def test_passes_and_timings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    small = [
        "--max-new-tokens",
        "8",
        "--repeats",
        "1",
        "--draft-len",
        "2",
        "--nodes",
        "4",
        "--json",
        str(out),
        "--prompts",
        "2",
    ]
    assert main(["bench", "--passes", *small]) == 0
    rows = json.loads(out.read_text())
    names = {row["setup"] for row in rows if row["temperature"] == 1.0}
    assert names >= {
        "plain",
        "token, chain 2",
        "block, chain 3",
        "rrs, best tree",
        "match, dynamic tree",
        "match, n-gram",
    }
    assert all(row["new_tokens"] == 2 * 8 for row in rows)
    assert all(
        row["tokens_per_pass"] == 1 and row["acceptance_rate"] is None for row in rows if row["setup"] == "plain"
    )
    assert all(1 <= row["tokens_per_pass"] <= row["nodes"] for row in rows)
    assert "rrs, best tree" in capsys.readouterr().out
    assert main(["bench", "--temperature", "0", *small]) == 0
    rows = json.loads(out.read_text())
    assert all(row["tokens_per_second"] > 0 and row["ratio"] > 0 for row in rows)
    assert next(row["ratio"] for row in rows if row["setup"] == "plain") == 1
    assert next(row["predicted"] for row in rows if row["setup"] == "plain") == 1
    assert all(row["predicted"] > 0 for row in rows if row["setup"] != "match, n-gram")
    assert "draft step" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "value"), [("--nodes", "1"), ("--repeats", "0"), ("--prompts", "0")])
def test_bad_input(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", option, value]) == 2
    assert "nodes must be >= 2, repeats and prompts >= 1" in capsys.readouterr().err
