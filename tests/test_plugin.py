"""The pytest plugin, as a newcomer meets it: files of one's own, checked from the command line."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from minispec.checks.parts import load
from minispec.lab import check_drafter, check_rule
from minispec.lab.report import EFFICIENCY

ROOT = Path(__file__).parent.parent

RULE = '''
import torch

def verify(p, q, drafted, rng):
    """Row by row, as one writes it first."""
    B, K = drafted.shape
    accepted, tokens = [], []
    for b in range(B):
        n, law = 0, p[b, K]
        while n < K and drafted[b, n] >= 0:
            x = drafted[b, n]
            ratio = p[b, n, x] / q[b, n, x]
            if not rng.flip(ratio.clamp(max=1)[None])[0]:
                rest = (p[b, n] - q[b, n]).clamp(min=0)
                law = rest / rest.sum()
                break
            n += 1
        if n < K and drafted[b, n] < 0:
            law = p[b, n]
        accepted.append(n)
        tokens.append(law)
    return torch.tensor(accepted), rng.pick(torch.stack(tokens))
'''
MATCH = """
import torch

def verify(p, q, drafted, rng):
    B, K = drafted.shape
    accepted, token = torch.zeros(B, dtype=torch.long), torch.zeros(B, dtype=torch.long)
    going = torch.ones(B, dtype=torch.bool)
    for i in range(K + 1):
        y = rng.pick(p[:, i])
        token = torch.where(going, y, token)
        going = going & (y == drafted[:, i] if i < K else False)
        accepted = accepted + going
        if not going.any():
            break
    return accepted, token
"""
DRAFTER = """
import torch
from minispec import Draft, Tree

class Mine:
    kind, max_nodes = "chain", 3
    def __init__(self, draft):
        self.draft = draft
    def begin(self, prompts, sampling):
        return MySession(self.draft, [list(p) for p in prompts], sampling)

class MySession:
    def __init__(self, draft, texts, sampling):
        self.draft, self.texts, self.sampling = draft, texts, sampling
    def propose(self, new_tokens, depth_limit, rng):
        self.texts = [text + list(new) for text, new in zip(self.texts, new_tokens)]
        K = min(2, max(depth_limit))
        tokens = torch.full((len(self.texts), K + 1), -1)
        q = torch.zeros(len(self.texts), K + 1, self.draft.config.vocab_size, dtype=torch.float64)
        for b, text in enumerate(self.texts):
            tokens[b, 0] = text[-1]
            for i in range(1, min(K, depth_limit[b]) + 1):
                logits = self.draft(torch.tensor([text + tokens[b, 1:i].tolist()]))[:, -1]
                q[b, i] = self.sampling.probs(logits)[0]
                tokens[b, i] = rng.pick(q[b, i][None])[0]
        return Draft(Tree.chain(K), tokens, q, "chain")
    def commit(self, paths):
        pass
    def select(self, rows):
        self.texts = [self.texts[row] for row in rows]

def make(target, draft):
    return Mine(draft)
"""
F1 = {  # what a newcomer gets wrong, and what the verdict must say
    "resamples from p": (RULE, "law = rest / rest.sum()", "law = p[b, n]", "rejection resamples from p"),
    "only zeroes the token": (
        RULE,
        "law = rest / rest.sum()",
        "law = p[b, n].clone(); law[x] = 0",
        "residual is p without the rejected token",
    ),
    "accepts iff p >= q": (
        RULE,
        "if not rng.flip(ratio.clamp(max=1)[None])[0]:",
        "if ratio < 1:",
        "accept where p >= q, no coin",
    ),
    "ratio inverted": (RULE, "p[b, n, x] / q[b, n, x]", "q[b, n, x] / p[b, n, x]", "ratio inverted"),
    "match with a second draw": (
        MATCH,
        "return accepted, token",
        "return accepted, torch.where(accepted < K, rng.pick(p[torch.arange(B), accepted.clamp(max=K)]), token)",
        "match draws again on a mismatch",
    ),
    "draft takes argmax": (DRAFTER, "rng.pick(q[b, i][None])[0]", "q[b, i].argmax()", "draft takes argmax"),
    "draft drawn at T = .5": (
        DRAFTER,
        "rng.pick(q[b, i][None])[0]",
        "rng.pick(q[b, i][None] ** 2)[0]",
        "draft temperature not in q",
    ),
}


def imported(source: str, folder: Path) -> ModuleType:
    path = folder / "mine.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", F1)
def test_f1_the_verdict_names_the_bug_of_a_newcomer(name: str, tmp_path: Path) -> None:
    source, right, wrong, named = F1[name]
    assert source.count(right) == 1
    module = imported(source.replace(right, wrong), tmp_path)
    kinds = ["chain", "chosen"] if source is MATCH else None
    report = (
        check_drafter(module.make, samples=60)
        if source is DRAFTER
        else check_rule(module.verify, kinds=kinds, samples=60)
    )
    assert not report.lossless
    assert any(f"this one of the museum does: {named}" in cause for cause in report.causes), str(report)
    assert named in str(report)


@pytest.mark.parametrize(
    "source", [RULE, pytest.param(MATCH, marks=pytest.mark.slow), DRAFTER], ids=["rule", "match", "drafter"]
)
def test_the_newcomers_files_are_right_before_they_are_spoilt(source: str, tmp_path: Path) -> None:
    module = imported(source, tmp_path)
    kinds = ["chain", "chosen"] if source is MATCH else None
    if source is DRAFTER:
        report = check_drafter(module.make, samples=60)
        assert report.failed == {EFFICIENCY}, str(report)  # it reads the whole text for each token
    else:
        report = check_rule(module.verify, kinds=kinds, samples=60)
        assert report.ok, str(report)


# --- the command line --------------------------------------------------------------------------------------


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """An environment in which the plugin is a top-level module, as the wheel installs it."""
    shutil.copy(ROOT / "minispec" / "checks" / "hooks.py", tmp_path / "minispec_pytest.py")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    return {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "120"}


def pytest_run(arguments: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "minispec_pytest",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        *arguments,
    ]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, encoding="utf-8")


def test_someone_elses_run_loads_nothing_of_ours(tmp_path: Path, plugin: dict[str, str]) -> None:
    code = (
        "import sys\n"
        "def test_nothing(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.hasplugin('minispec_pytest')\n"
        "    assert not [m for m in ('torch', 'numpy', 'scipy', 'minispec') if m in sys.modules]\n"
        "    assert not hasattr(pytestconfig.option, 'rule')\n"
    )
    (tmp_path / "test_theirs.py").write_text(code, encoding="utf-8")
    done = pytest_run(["-q", "test_theirs.py"], tmp_path, plugin)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_the_fixture_lossless(tmp_path: Path, plugin: dict[str, str]) -> None:
    code = (
        "def decoder(prompt, n, seed):\n"
        "    import random\n"
        "    chance = random.Random(seed)\n"
        "    return [chance.randrange(2) for _ in range(n)]\n"
        "def law(p):\n"
        "    return {(a, b): (p if a else 1 - p) * (p if b else 1 - p) for a in (0, 1) for b in (0, 1)}\n"
        "def test_right(lossless):\n"
        "    lossless(decoder, law(.5), length=2, samples=1000)\n"
        "def test_wrong(lossless):\n"
        "    lossless(decoder, law(.3), length=2, samples=1000)\n"
    )
    (tmp_path / "test_mine.py").write_text(code, encoding="utf-8")
    done = pytest_run(["-q", "test_mine.py"], tmp_path, plugin)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "NOT LOSSLESS: first-token law" in done.stdout


def test_checking_a_file_from_the_command_line(tmp_path: Path, plugin: dict[str, str]) -> None:
    (tmp_path / "my_rule.py").write_text(RULE.replace("law = rest / rest.sum()", "law = p[b, n]"), encoding="utf-8")
    options = ["--pyargs", "minispec.checks", "--samples", "60", "--level", "1e-4", "--rule", "my_rule.py:verify"]
    done = pytest_run([*options, "--seed", "5"], tmp_path, plugin)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "minispec: replay with --seed 5" in done.stdout
    assert "rule verify: NOT LOSSLESS" in done.stdout
    assert "rejection resamples from p" in done.stdout
    assert "Replay with seed=5, level=0.0001." in done.stdout


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("none.py:verify", "there is no file none.py"),
        ("here.py:other", "has no 'other'; it has two"),
        ("here.py", "expected FILE.py:NAME, got 'here.py'"),
        ("broken.py:f", "importing it raised SyntaxError"),
    ],
)
def test_wrong_names_are_usage_errors(place: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.py").write_text("def two(p, q):\n    return p\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("def f(:\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pytest.UsageError, match=words):
        load(place)


def test_a_usage_error_is_one_line_and_exit_status_4(tmp_path: Path, plugin: dict[str, str]) -> None:
    (tmp_path / "here.py").write_text("def two(p, q):\n    return p\n", encoding="utf-8")
    done = pytest_run(["--pyargs", "minispec.checks", "--rule", "here.py:two"], tmp_path, plugin)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "ERROR: rule must be (p, q, drafted, rng) or (p, q, tokens, tree, rng), two has 2 parameters" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.slow
def test_the_package_checks_itself(tmp_path: Path, plugin: dict[str, str]) -> None:
    done = pytest_run(["-q", "--pyargs", "minispec.checks"], tmp_path, plugin)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("LOSSLESS as far as") == 16
