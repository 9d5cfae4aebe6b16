"""Malformed registries: each gets a message with file and line and exit status 2, and never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from slimserve import receipt_file
from slimserve.cli import main

GOOD = Path(__file__).parent.parent / "registry"
BOX, RACK = "tiny-bf16-box.yaml", "expert-fp8-rack.yaml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry of its own that the command reads."""
    target = tmp_path / "registry"
    shutil.copytree(GOOD, target)
    monkeypatch.setenv("SLIMSERVE_PROFILES", str(target))
    monkeypatch.setenv("SLIMSERVE_CACHE", str(tmp_path / "cache"))
    return target


@dataclass(frozen=True)
class Case:
    """One fault: `old` becomes `new` in `file`; the message names `line_of` (text on the line) and holds `says`."""

    name: str
    file: str
    old: str
    new: str
    says: tuple[str, ...]
    line_of: str | None = None


LONG = "9" * 400
CASES = [
    Case(
        "unknown top key",
        BOX,
        "title: Tiny",
        "titel: x\ntitle: Tiny",
        ("unknown key titel", "did you mean title?"),
        "titel",
    ),
    Case(
        "misspelt engine key",
        BOX,
        "  enable_prefix_caching:",
        "  enable_prefix_cachng:",  # A2
        ("did you mean enable_prefix_caching?",),
        "cachng",
    ),
    Case(
        "misspelt setting key",
        BOX,
        "    why: two cores",
        "    wy: two cores",
        ("did you mean why?", "why is missing"),
        "wy:",
    ),
    Case(
        "misspelt evidence",
        BOX,
        "{derived: cores x 2}",
        "{derivd: cores x 2}",
        ("unknown key engine.max_num_seqs.evidence.derivd",),
        "derivd",
    ),
    Case(
        "unknown nested value key",
        RACK,
        "num_speculative_tokens: 2",
        "num_speculative_token: 2",
        ("did you mean num_speculative_tokens?",),
    ),
    Case(
        "unknown model key",
        "models/tiny.yaml",
        "title: Tiny",
        "titles: Tiny",
        ("unknown key titles", "title is missing"),
        "titles",
    ),
    Case(
        "unknown geometry key",
        "models/tiny.yaml",
        "  head_dim",
        "  head_dims",
        ("did you mean head_dim?",),
        "head_dims",
    ),
    Case(
        "unknown platform key",
        "platforms/box.yaml",
        "kind: cpu",
        "kind: cpu\ngpu: 3",
        ("unknown key gpu", "did you mean gpus?"),
        "gpu: 3",
    ),
    Case("unknown source key", "sources.yaml", "    title", "    titel", ("unknown key sources.paper.titel",), "titel"),
    Case(
        "text for a number",
        BOX,
        "value: 4\n",
        "value: four\n",
        ('engine.max_num_seqs.value = "four"', "a whole number"),
        "four",
    ),
    Case("number for text", BOX, "title: Tiny on a box", "title: 12", ("title = 12",), "title: 12"),
    Case(
        "yes for true",
        BOX,
        "value: true\n    why: agents",
        "value: yes\n    why: agents",
        ("true or false",),
        "value: yes",
    ),
    Case("float for a count", BOX, "value: 4\n", "value: 4.5\n", ("max_num_seqs.value = 4.5",), "4.5"),
    Case(
        "setting without value",
        BOX,
        "    value: bfloat16\n    why: the check",
        "    why: the check",
        ("engine.dtype.value is missing",),
    ),
    Case(
        "bare value",
        BOX,
        "    value: 4\n    why: two cores are busy with four streams already\n    evidence: {derived: cores x 2}\n",
        "    4\n",
        ("engine.max_num_seqs = 4", "a mapping with value, why, evidence"),
    ),
    Case(
        "missing why",
        BOX,
        "    why: two cores are busy with four streams already\n",
        "",
        ("engine.max_num_seqs.why is missing",),
    ),
    Case(
        "empty why",
        BOX,
        "why: two cores are busy with four streams already",
        "why: ''",
        ("engine.max_num_seqs.why",),
        "why: ''",
    ),
    Case(
        "blank why",
        BOX,
        "why: two cores are busy with four streams already",
        "why: '   '",
        ("engine.max_num_seqs.why",),
        "'   '",
    ),
    Case("null why", BOX, "why: two cores are busy with four streams already", "why:", ("engine.max_num_seqs.why",)),
    Case(
        "why repeats the key",
        BOX,
        "why: two cores are busy with four streams already",
        "why: the max num seqs is set to 4",
        ("says nothing beyond key and value",),
        "is set to 4",
    ),
    Case(
        "why repeats the value",
        BOX,
        "why: the checkpoint was trained and is stored in it, so nothing is rounded again",
        "why: dtype uses bfloat16 because we want bfloat16",
        ("engine.dtype.why says nothing",),
    ),
    Case(
        "shared why",
        BOX,
        "why: quantising the cache of a toy would save little and blur its answers",
        "why: the checkpoint was trained and is stored in it, so nothing is rounded again",
        ("word for word that of engine.dtype",),
    ),
    Case(
        "missing evidence",
        BOX,
        "    evidence: {derived: cores x 2}\n",
        "",
        ("engine.max_num_seqs.evidence is missing",),
    ),
    Case(
        "two kinds of evidence",
        BOX,
        "{derived: cores x 2}",
        "{derived: x, policy: exact-kv}",
        ("exactly one of receipt", "exactly one of policy: ID"),
    ),
    Case("no kind of evidence", BOX, "{derived: cores x 2}", "{}", ("exactly one of receipt", "0 given")),
    Case(
        "published without figure",
        RACK,
        'section: "4", figure: 32 running',
        'section: "4"',
        ("source, section and figure",),
    ),
    Case(
        "unknown source",
        RACK,
        'published: paper, section: "4", figure: 32',
        'published: papre, section: "4", figure: 32',
        ("cites papre", "did you mean paper?"),
    ),
    Case("unknown policy", BOX, "{policy: exact-kv}", "{policy: exact-k}", ("did you mean exact-kv?",)),
    Case("absent receipt", BOX, "{derived: cores x 2}", "{receipt: a.json}", ("profiles/receipts has no such file",)),
    Case(
        "measured without receipt",
        BOX,
        "status: unmeasured",
        "status: measured",
        ("measured is earned",),
        "status: measured",
    ),
    Case(
        "duplicate top key",
        BOX,
        "status: unmeasured",
        "status: unmeasured\nstatus: unmeasured",
        ("status is given twice",),
    ),
    Case(
        "duplicate nested key",
        BOX,
        "    value: 4\n",
        "    value: 4\n    value: 5\n",
        ("engine.max_num_seqs.value is given twice",),
        "value: 5",
    ),
    Case("duplicate flow key", RACK, "{method: mtp,", "{method: mtp, method: mtp,", ("is given twice",)),
    Case("tab", BOX, "  dtype:", "\tdtype:", ("a tab is used for indentation",), "\tdtype"),
    Case("broken syntax", BOX, "aliases: [tiny]", "aliases: [tiny", ("is not valid YAML",)),
    Case(
        "anchor and alias",
        BOX,
        "aliases: [tiny]",
        "aliases: &a [tiny]\nnot: *a",
        ("uses the anchor &a", "uses the alias *a"),
    ),
    Case("merge key", BOX, "title: Tiny on a box", "<<: {a: b}\ntitle: Tiny on a box", ("unknown key <<",)),
    Case("python tag", BOX, "title: Tiny on a box", "title: !!python/object/apply:os.system [id]", ("uses the tag",)),
    Case("second document", BOX, "not_carried:", "---\nnot_carried:", ("holds a second document",)),
    Case("control character", BOX, "title: Tiny", "title: \x07Tiny", ("printable text",)),
    Case("a list on top", BOX, "id: tiny-bf16-box", "- id: tiny-bf16-box", ("YAML",)),
    Case("id that is a path", BOX, "id: tiny-bf16-box", "id: ../../etc/passwd", ('id = "../../etc/passwd"',), "id: .."),
    Case("model that is a path", BOX, "model: tiny", "model: ../models/tiny", ("model =",), "model: .."),
    Case("id unlike its file", BOX, "id: tiny-bf16-box", "id: other", ("the name of a file is its id",), "id: other"),
    Case("alias that is a path", BOX, "[tiny]", "['a/b']", ('aliases[0] = "a/b"',)),
    Case("repository that is a path", "models/tiny.yaml", "somebody/tiny", "../../tiny", ("repo",), "repo"),
    Case(
        "an observation for a derivation",
        BOX,
        "derived: two of the shortest prompts",
        "derived: 256 was seen to be enough",
        ("tells of what was seen", "cite that, or give the formula"),
        "256 was seen",
    ),
    Case(
        "branch for a revision",
        "models/tiny.yaml",
        "0123456789abcdef0123456789abcdef01234567",
        "main",
        ("revision",),
        "main",
    ),
    Case("short revision", "models/tiny.yaml", "0123456789abcdef0123456789abcdef01234567", "0123456", ("revision",)),
    Case("infinite number", BOX, "value: 4\n", "value: .inf\n", ("not a finite number",), ".inf"),
    Case("overflowing number", BOX, "value: 4\n", "value: 1e999\n", ("not a finite number",), "1e999"),
    Case("endless digits", BOX, "value: 4\n", f"value: {LONG}\n", ("a number of 400 digits",)),
    Case("zero slots", BOX, "value: 4\n", "value: 0\n", ("from 1 to 1048576",)),
    Case("negative slots", BOX, "value: 4\n", "value: -4\n", ("from 1 to 1048576",)),
    Case("absurd slots", BOX, "value: 4\n", "value: 99999999999\n", ("from 1 to 1048576",)),
    Case("memory share above one", RACK, "value: 0.96", "value: 1.96", ("between 0 and 1, both excluded",)),
    Case(
        "zero heads",
        "models/tiny.yaml",
        "num_attention_heads: 4",
        "num_attention_heads: 0",
        ("num_attention_heads = 0",),
    ),
    Case(
        "KV heads that do not divide",
        "models/tiny.yaml",
        "num_key_value_heads: 2",
        "num_key_value_heads: 3",
        ("does not divide",),
    ),
    Case(
        "more experts a token than experts",
        "models/expert.yaml",
        "num_experts_per_tok: 10",
        "num_experts_per_tok: 600",
        ("exceeds",),
    ),
    Case(
        "trait without its shapes",
        "models/expert.yaml",
        "  linear_num_key_heads: 16\n",
        "",
        ("geometry.linear_num_key_heads is missing",),
    ),
    Case("unknown model", BOX, "model: tiny", "model: tny", ("did you mean tiny?",), "model: tny"),
    Case("unknown quant", BOX, "quant: bf16", "quant: bf17", ("did you mean bf16?",), "quant: bf17"),
    Case("unknown platform", BOX, "platform: box", "platform: bx", ("did you mean box?",), "platform: bx"),
    Case(
        "unknown status",
        BOX,
        "status: unmeasured",
        "status: fast",
        ("measured or published or unmeasured",),
        "status: fast",
    ),
    Case(
        "unknown dtype",
        BOX,
        "value: bfloat16\n    why: the check",
        "value: bf16\n    why: the check",
        ("bfloat16 or float16",),
    ),
    Case("dead alias", BOX, "[tiny]", "[expert-fp8-rack]", ("the alias expert-fp8-rack is dead",)),
    Case("two defaults", RACK, "status: published", "status: published\ndefault: true", ("second default",)),
    Case(
        "two cache sizes",
        BOX,
        "  kv_cache_memory_bytes:",
        "  gpu_memory_utilization:\n    value: 0.9\n    why: as much as the driver and other programs leave over\n"
        "    evidence: {derived: x}\n  kv_cache_memory_bytes:",
        ("2 of gpu_memory_utilization and kv_cache_memory_bytes",),
    ),
    Case("context beyond training", BOX, "value: 2048", "value: 4096", ("trained for 2048 positions",), "value: 4096"),
    Case(
        "ranks without devices",
        BOX,
        "value: 1\n    why: a single",
        "value: 2\n    why: a single",
        ("2 ranks for 1 devices",),
    ),
    Case("three ranks", RACK, "value: 8\n", "value: 3\n", ("legal counts: 1, 2, 4, 8",)),
    Case("lower-case variable", BOX, "OMP_NUM_THREADS", "omp_num_threads", ("environment.omp_num_threads",)),
    Case("secret in a profile", BOX, "OMP_NUM_THREADS", "VLLM_API_KEY", ("a secret does not belong in a profile",)),
    Case("fixed variable in a profile", BOX, "OMP_NUM_THREADS", "VLLM_HOST_IP", ("is fixed for every profile",)),
    Case(
        "scores without a number",
        BOX,
        "  OMP_NUM_THREADS:\n    value: ",
        "  VLLM_SPARSE_INDEXER_MAX_LOGITS_MB:\n    value: lots # ",
        ("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB = lots", "not a whole number of MiB"),
    ),
    Case("gpu kind without gpus", "platforms/box.yaml", "kind: cpu", "kind: cuda", ("needs `gpus`",)),
]


MORE = [
    Case("measured by a path", BOX, "{derived: cores x 2}", "{receipt: ../sources.yaml}", ("a plain relative path",)),
    Case("measured by any file", BOX, "{derived: cores x 2}", "{receipt: /etc/passwd}", ("a plain relative path",)),
    Case("control sequence in a title", BOX, "title: Tiny on a box", 'title: "\\e[31mTiny"', ("it must be printable",)),
    Case("two lines in a title", BOX, "title: Tiny on a box", 'title: "Tiny\\nruns"', ("it must be one line",)),
    Case("NUL in a variable", BOX, 'value: "2"', 'value: "2\\0"', ("it must be printable",)),
    Case("foreign variable", BOX, "OMP_NUM_THREADS", "LD_PRELOAD", ("configures neither the engine nor a library",)),
    Case("top_p of zero", "models/tiny.yaml", "top_p: 0.9", "top_p: 0", ("from 0.01 to 1",)),
    Case("no bytes", "models/tiny.yaml", "bytes: 1000", "bytes: 0", ("from 1 to",)),
    Case(
        "more on the host than there is",
        "models/tiny.yaml",
        "bytes: 1000",
        "bytes: 1000\n    host_bytes: 2000",
        ("exceeds",),
    ),
    Case(
        "absurd heads", "models/tiny.yaml", "num_attention_heads: 4", "num_attention_heads: 10000", ("from 1 to 4096",)
    ),
    Case("absurd GPUs", "platforms/rack.yaml", "count: 8", "count: 2048", ("from 1 to 256",)),
    Case("month 99", "sources.yaml", "2026-08", "2026-99", ("a date such as",)),
    Case("evidence of a platform", "platforms/rack.yaml", "published: paper", "published: nowhere", ("cites nowhere",)),
    Case("missing manifest", "models/tiny.yaml", "manifest: tiny-bf16", "manifest: tiny-bf17", ("does not exist",)),
]
CASES += MORE


def run(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["--list"])
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return status, err


def test_the_good_registry_loads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "tiny-bf16-box" in capsys.readouterr().out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_fault_is_named_with_file_and_line(case: Case, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / case.file
    text = path.read_text()
    assert case.old in text
    changed = text.replace(case.old, case.new, 1)
    path.write_text(changed)
    status, err = run(capsys)
    assert status == 2
    assert case.file in err
    for words in case.says:
        assert words in err
    if case.line_of is not None:
        line = next(number for number, row in enumerate(changed.splitlines(), 1) if case.line_of in row)
        assert f"{case.file}:{line}: " in err


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"kind": "start", "cases": {"planned": {"outcome": "came up"}}}, None),
        ({"kind": "start", "cases": {}}, "it tells of no start"),
        ({"cases": {"planned": {}}}, "it tells of no start"),
        (None, "it was changed after it was written"),
    ],
)
def test_a_receipt_of_a_start_is_looked_at(
    told: dict[str, object] | None, says: str | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "starts/one.json"
    (folder / "receipts/starts").mkdir(parents=True)
    data = {"schema": receipt_file.SCHEMA, "kind": "start", **(told or {"cases": {"planned": {}}})}
    if told is not None and "kind" not in told:
        del data["kind"]
    data["sha256"] = receipt_file.digest(data) if told is not None else "0" * 64
    (folder / "receipts" / name).write_text(json.dumps(data))
    path = folder / "platforms/box.yaml"
    path.write_text(path.read_text().replace("{derived: what the label says}", f"{{receipt: {name}}}", 1))
    if says is None:
        assert main(["--list"]) == 0
        return
    status, err = run(capsys)
    assert status == 2
    assert says in err
    assert "platforms/box.yaml:13: needs.process_bytes cites the receipt starts/one.json" in err


def test_all_faults_of_all_files_are_told_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, old, new in (
        (BOX, "titl", "title"),
        (BOX, "value: 4\n", "value: no\n"),
        (RACK, "quant", "qant"),
        ("models/tiny.yaml", "head_dim: 16", "head_dim: x"),
        ("sources.yaml", "title", "titel"),
    ):
        path = folder / name
        path.write_text(path.read_text().replace(old, new, 1))
    status, err = run(capsys)
    assert status == 2
    for words in (
        "unknown key titlee",
        "max_num_seqs.value",
        "unknown key qant",
        "quant is missing",
        "head_dim",
        "titel",
    ):
        assert words in err


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50_000_000)


def bomb(path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    path.write_text("\n".join(levels))


FILES: list[tuple[str, Callable[[Path], object], str]] = [
    ("50 MB file", huge, "files over 1,048,576 bytes are not read"),
    ("alias bomb", bomb, "uses the alias"),
    ("latin-1", lambda path: path.write_bytes(b"id: x\ntitle: caf\xe9\n"), "byte 0xe9 is not UTF-8"),
    ("UTF-16", lambda path: path.write_text("id: x", encoding="utf-16"), "is not UTF-8"),
    ("binary", lambda path: path.write_bytes(bytes(range(256))), "UTF-8"),
    ("NUL bytes", lambda path: path.write_bytes(b"id: \x00x\n"), "printable text"),
    ("empty", lambda path: path.write_text(""), "holds nothing"),
    ("comment only", lambda path: path.write_text("# later\n"), "holds nothing"),
    ("a list", lambda path: path.write_text("- a\n- b\n"), "holds a list"),
    ("a number", lambda path: path.write_text("12\n"), "holds a whole number"),
    ("deep nesting", lambda path: path.write_text("a: " + "[" * 100_000), "extra"),
    (
        "deep block nesting",
        lambda path: path.write_text("".join(f"{' ' * n}a{n}:\n" for n in range(500))),
        "nested more than",
    ),
    ("complex key", lambda path: path.write_text("? [a, b]\n: c\n"), "as a key"),
    ("control character", lambda path: path.write_text("a: \u00e9\u00e9\u00e9\n\n\nb: \x07\n"), "extra.yaml:4"),
    ("thousands of keys", lambda path: path.write_text("".join(f"k{n}: 1\n" for n in range(60_000))), "unknown key k0"),
    ("a folder", lambda path: path.mkdir(), "is not a regular file"),
    ("dangling link", lambda path: path.symlink_to("nowhere"), "cannot be read"),
]


@pytest.mark.parametrize(("make", "says"), [row[1:] for row in FILES], ids=[row[0].replace(" ", "-") for row in FILES])
def test_a_file_that_is_no_profile(
    make: Callable[[Path], object], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(folder / "extra.yaml")
    status, err = run(capsys)
    assert status == 2
    assert "extra.yaml" in err
    assert says in err


def test_an_ambiguous_alias_names_both_places(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / BOX).read_text().replace("id: tiny-bf16-box", "id: tiny-copy").replace("default: true\n", "")
    (folder / "tiny-copy.yaml").write_text(text)
    status, err = run(capsys)
    assert status == 2
    assert "the alias tiny is ambiguous" in err
    assert "tiny-bf16-box.yaml" in err
    assert "tiny-copy.yaml" in err


def test_a_registry_without_a_default(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / BOX).write_text((folder / BOX).read_text().replace("default: true\n", ""))
    status, err = run(capsys)
    assert status == 2
    assert f"{folder}: no profile is the default" in err


def test_a_file_with_another_ending_is_not_lost_in_silence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tiny-bf16-box.yml").write_text((folder / BOX).read_text())
    (folder / "._tiny-bf16-box.yaml").write_bytes(b"\x00\x05\x16\x07")  # what another system leaves beside a copy
    status, err = run(capsys)
    assert status == 2
    assert "tiny-bf16-box.yml: is called .yml" in err
    assert "._tiny" not in err


def test_a_registry_without_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder)
    status, err = run(capsys)
    assert status == 2
    assert "cannot be read" in err


def test_a_broken_registry_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    (folder / BOX).write_text("id: 3\n")
    assert main(["--list", "--json"]) == 2
    data = json.loads(capsys.readouterr().out)
    assert data["error"] == "invalid"
    assert all({"what", "why", "do", "where"} <= set(finding) for finding in data["findings"])
