"""Random requests, drawn from the OpenAPI and from what people and attackers type; what no answer may ever be."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from starlette.testclient import TestClient

from fivefold.job import RECIPES
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.machine.catalog import ALIASES, INSTANCES
from fivefold.machine.catalog import list_names as machine_names
from fivefold.model.catalog import list_names as model_names
from fivefold.model.published import CATALOG, VERSIONS
from fivefold.requests.answers import QUESTIONS
from fivefold.web.pages.ask import AskPage
from fivefold.web.pages.dryrun import DryrunPage
from fivefold.web.pages.files import ExplainPage, TracePage
from fivefold.web.pages.learn import list_chapters
from fivefold.web.pages.plan import PlanQuestion
from fivefold.web.pages.runs import RunQuestion
from fivefold.web.pages.search import SearchPage
from fivefold.web.pages.stream import FAILED
from fivefold.web.pages.sweep import SweepQuestion, SweepStartPage
from fivefold.web.question import CompareQuestion, JobQuestion
from tests.web.conftest import SECRET

WORDS = {
    "model": [
        "llama3-8b",
        "nano",
        "deepseek-v3",
        "gpt2",
        "own.toml",
        "link.toml",
        "../outside.toml",
        "/etc/passwd",
        ".",
        "",
        " ",
        "lama3-8b",
        "Llama 3 8B",
        *model_names(),
        *(entry.repository for entry in CATALOG.values() if entry.repository),
        *VERSIONS,
    ],
    "machine": [
        "h100:8",
        "h100",
        "local",
        "b200:72 price=3",
        "mi300x:16 nic=1Gbit/node",
        "own.toml:4",
        "h100:0",
        "h100:9999999",
        "h101:8",
        ":8",
        "h100:8 nic=",
        "h100:8 memory=1MiB",
        "h100:8 speed=2",
        "2x8 H100",
        "16 H100s",
        "HGX H200",
        "Tesla V100-SXM2-32GB",
        "2x8 p4d.24xlarge",
        *(f"{name}:{ranks}" for name in machine_names() for ranks in (1, 6, 64, 2048)),
        *(f"{count}{name}" for name in (*INSTANCES, *ALIASES) for count in ("", "3x")),
    ],
    "layout": [
        "dp8 zero3 mbs1", "dp2 tp2 pp2 v2", "tp8", "pp8 zbv", "dp4 ep2", "dp9", "dp8 dp8", "stages=1-2", "zero3/3",
        "cp8", " ", "dp2 tp2x2", "dp2 tp2x4 ep2", "dp4 tp2 sp", "tp8/pp4/vpp2", "TP 2 / DP 4 + FSDP2", "cp2",
        "nonsense",
    ],
    "precision": [*RECIPES, "int8"],
    "attention": ["flash", "unfused", "x"],
    "stack": ["fivefold", "megatron-core", "deepspeed", "none"],
    "set": [
        "loss=chunked", "optimizer.kind=muon", "a=b", "=", "[", "precision={}", "ramp={first=1,step=1}",
        "imbalance=nan", "fp8_attention=true",
    ],
    "config": ['{"model_type": "llama"}', "{", "[]", '{"layers": 1}', '{"model_type": 7}', '{"architectures": [1]}'],
    "run_config": [
        "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nmicro_batch_size: 1\n", '{"zero_optimization": {"stage": 3}}',
        "swift sft --model Qwen/Qwen3-8B --max_length 512", 'model = "own.toml"\nlayout = "dp4"\n', "a: [", "{",
        'model = "../outside.toml"\nlayout = "dp4"\n', 'model = "link.toml"\nlayout = "dp4"\n', "echo $(", "x = 1",
        "base_model: ../outside.toml\nsequence_len: 512\nmicro_batch_size: 1\ndeepspeed: /etc/passwd\n",
    ],
    "optimizer": ["muon", "adamw8bit", "x"],
    "loss": ["chunked", "plain", "x"],
    "documents": ["apart", "x"],
    "adapter": ["lora:8", "qlora:16", "lora:0", "x"],
    "adapter_targets": ["q_proj,v_proj", "all-linear,experts.down_proj", "x", ","],
    "modules_to_save": ["lm_head", "embed_tokens,lm_head", "x"],
    "rank_pattern": ["q_proj:8", "q_proj:0", "x"],
    "alpha_pattern": ["q_proj:8,v_proj:4", "q_proj:-1", "x"],
    "fused_scans": ["true", "false", "x"],
    "to": ["torchtitan", "megatron", "deepspeed", "fivefold", "x"],
    "compare": ["runs/a", "..", "inside", "x"],
    "folder": ["runs/a", "..", "/", "", "inside", "\\x00", "own.toml"],
    "files": ["own.toml", "dropped:1/x", "dropped:../x", "dropped:1/..", "link.toml", ".", "/etc/passwd"],
    "file": ["own.toml", "x.csv", "../x.csv", "/etc/x.csv"],
    "where": ["tp<=8", "tp", "zero<<1"],
    "layouts": ["dp* tp{1,2} zero{0,1}", "best 2", "dp8", "tp{1,2", "best 0", "x"],
    "rows": ["rows.jsonl", "rows.csv", "../x.csv", "/etc/x.csv", "own.toml", "link.toml", "new/rows.jsonl", ".jsonl"],
    "sequences": ["512, 1024", "8k", "0"],
    "batches": ["8", "8,16", "x"],
    "precisions": ["bf16, fp8", "fp8", "x"],
    "recomputations": ["none, full", "x"],
    "stacks": ["torchtitan", "fivefold,deepspeed", "x"],
    "work": ["1", "2", "x", "-1"],
    "question": [*QUESTIONS],
    "tokens": ["1e12", "2T", "1.5B", "x", "nan", "-1"],
    "price": ["2.2", "h100=2.2/h", "b200=1", "=", "x=y"],
    "assume": ["failures=1", "grid=france", "grid=nowhere", "pue"],
    "noise": ["4e6", "runs/a", "../..", "/etc", "nan"],
    "deadline": ["30d", "1", "0d"],
    "ranks": ["8-16", "16-8", "x"],
    "machines": ["h200:8", "nothing:8", "../outside.toml"],
    "by": ["time", "energy", "robust", "x"],
    "rank": ["0", "1", "-1", "99"],
    "name": [*list_chapters(), "../notation", "..%2f", "nothing"],
}  # fmt: skip
NUMBERS = ["0", "1", "8", "64", "8192", "-1", "1e9", "3.5", "999999999999999999999", "nan", "inf", "x", "true", "", "١"]
JUNK = [
    "", "%00", "\x00", "<script>alert(1)</script>", "{{7*7}}", "' OR 1=1", "𝕏" * 50, "a" * 5000, "../" * 30, "${HOME}",
    "\r\nX: y", "file:///etc/passwd", "%2e%2e%2fetc%2fpasswd", "\ud7ff", "‮",
]  # fmt: skip
PAGES = {
    "/plan": PlanQuestion.model_fields,
    "/plan/read": PlanQuestion.model_fields,
    "/plan/changes": PlanQuestion.model_fields,
    "/plan/config": PlanQuestion.model_fields,
    "/plan/model": JobQuestion.model_fields,
    "/learn/{name}": PlanQuestion.model_fields,
    "/compare": CompareQuestion.model_fields,
    "/sweep": SweepQuestion.model_fields,
    "/sweep/start": SweepStartPage.model_fields,
    "/sweep/file": SweepStartPage.model_fields,
    "/runs": RunQuestion.model_fields,
    "/search": SearchPage.model_fields,
    "/dryrun": DryrunPage.model_fields,
    "/ask": AskPage.model_fields,
    "/trace": TracePage.model_fields,
    "/explain": ExplainPage.model_fields,
}
PATHS = [
    "/", "/learn", "/learn/../x", "/nothing", "/static/", "/static/../x", "//etc/passwd", "/api", "/api/",
    "/api/predict/x", "/api/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd",
]  # fmt: skip
SLOW = ("/api/search", "/api/plan", "/api/ratios", "/api/dryrun")  # a process each, as the streams
STREAMS = {
    "/search/events": SearchPage.model_fields,
    "/ask/events": AskPage.model_fields,
    "/dryrun/events": DryrunPage.model_fields,
    "/sweep/events": SweepStartPage.model_fields,
    "/trace/events": TracePage.model_fields,
    "/explain/events": ExplainPage.model_fields,
}
STOPS = ("/search/events/stop", "/sweep/events/stop")
SLOW_SHARE = 0.02  # of the requests that need a process
STREAM_ENDS = ("found", "mistake", "stopped")  # the last event of a stream
Route = tuple[str, str, list[str]]


def list_routes(client: TestClient) -> tuple[list[Route], list[Route]]:
    """Method, path and parameters of every route of the OpenAPI, and of the pages, which take the same.

    The second list has those that need a process each.
    """
    schema = client.get("/api/openapi.json").json()
    routes = [
        (method.upper(), path, [item["name"] for item in route.get("parameters", [])])
        for path, methods in schema["paths"].items()
        for method, route in methods.items()
    ]
    short = [
        *(route for route in routes if route[1] not in SLOW),
        *((("GET", path, [*fields])) for path, fields in 3 * [*PAGES.items()]),
        *(("GET", path, ["x"]) for path in PATHS),
        *(("POST", path, ["work"]) for path in STOPS),
    ]
    streams = [("GET", path, [*fields]) for path, fields in STREAMS.items()]
    return short, [*(route for route in routes if route[1] in SLOW), *streams]


LEGAL = ("model", "machine", "layout", "seq", "gbs", "layers", "width", "heads", "kv_heads", "ffn", "vocab")


def draw_value(chance: random.Random, name: str) -> str:
    """Draw the value of one parameter: now and then junk, else one of its words, or a number."""
    return chance.choice(JUNK if chance.random() < 0.1 else WORDS.get(name, NUMBERS))


def draw_step(chance: random.Random) -> list[tuple[str, str]]:
    """Draw a model of the catalog, a machine, and a layout whose degrees divide the machine more often than not."""
    ranks = chance.choice((1, 2, 6, 8, 16, 24, 64, 256, 2048))
    left, words = ranks, []
    for axis in chance.sample(("tp", "cp", "pp"), 3):
        degree = chance.choice([size for size in (1, 1, 2, 3, 4, 8, 16) if left % size == 0])
        left //= degree
        inner = chance.choice((1, 1, 1, 2)) if axis == "tp" and degree % 2 == 0 else 1
        words.append(f"{axis}{degree // inner}" + (f"x{inner}" if inner > 1 else ""))
    words += [f"dp{left}", f"zero{chance.randint(0, 3)}", f"mbs{chance.choice((1, 1, 2, 3))}"]
    words += chance.sample(
        ["ep2", "ep8", "etp2", "v2", "v3", "ulysses", "nosp", "sp", "ac=full", "ac=selective", "ac=full@1", *SCHEDULES],
        chance.randint(0, 3),
    )
    gbs = left * chance.choice((1, 2, 4, 12)) if chance.random() < 0.9 else 5
    batch = [("gbs", str(gbs))] if chance.random() < 0.8 else []  # else one sequence per GPU
    return [
        ("model", chance.choice(model_names())),
        ("machine", f"{chance.choice(machine_names())}:{ranks}"),
        ("layout", " ".join(words)),
        *batch,
        ("seq", str(chance.choice((3, 512, 4096, 4100)))),
    ]


def draw(chance: random.Random, route: tuple[str, str, list[str]]) -> dict[str, Any]:
    """One request: mostly of what is legal, so that it gets far, with junk among it."""
    method, path, names = route
    picked = chance.sample(names, chance.randint(0, min(6, len(names))))
    values: list[tuple[str, str]] = []
    for name in picked:
        values += [(name, draw_value(chance, name))] * chance.choice((1, 1, 1, 2))
    if "layout" in names and chance.random() < 0.5:  # a step that may well be legal
        values = draw_step(chance) + [item for item in values if item[0] not in LEGAL][: chance.choice((0, 0, 1, 9))]
    if path.startswith("/api/ask"):  # without one it is a search
        values = [("layout", chance.choice(WORDS["layout"])), *(item for item in values if item[0] != "layout")]
    if chance.random() < 0.05:
        values.append((chance.choice(JUNK) or "x", chance.choice(JUNK)))
    path = path.replace("{question}", chance.choice([*WORDS["question"], "x"])).replace(
        "{name}", chance.choice(WORDS["name"])
    )
    request: dict[str, Any] = {"method": method, "url": path}
    if method == "POST" and path not in STOPS:
        body: Any = dict(values)
        return request | {"json": chance.choice([body, body, body, [], None, "x", {"layout": 3}, {"set": [body]}])}
    headers = {"host": "evil.example"} if chance.random() < 0.02 else {}
    return request | {"params": values, "headers": headers, "follow_redirects": False}


def find_fault(answer: Any) -> str:
    """Why this may not be an answer; empty if it may."""
    text = answer.text
    if answer.status_code >= 500:
        return f"status {answer.status_code}"
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream":
        return find_fault_of_stream(text)
    return find_fault_of_text(text, is_page=kind == "text/html")


def find_fault_of_stream(text: str) -> str:
    """Why these may not be the events of a stream; empty if they may."""
    events = re.findall(r"event: (\w+)\ndata: (.*)\n\n", text)
    names = [name for name, _ in events]
    if not names or names[-1] not in STREAM_ENDS or {*names[:-1]} & {*STREAM_ENDS}:
        return f"ends with {names[-1:]} of {len(names)} events"
    values = [(name, json.loads(data)) for name, data in events]
    if values[-1][0] == "mistake" and (values[-1][1] == FAILED or "\n" in values[-1][1]):
        return f"tells {values[-1][1]!r}"
    faults = (
        find_fault_of_text(value if isinstance(value, str) else str(value), is_page=name in ("sketch", "found"))
        for name, value in values
    )
    return next(filter(None, faults), "")


def find_fault_of_text(text: str, *, is_page: bool) -> str:
    """Why this may not be in an answer; empty if it may."""
    never = ["Traceback", SECRET, "root:x:", 'File "/']
    never += ["<script>alert"] if is_page else []
    told = [word for word in never if word in text]
    if is_page and (unset := re.search(r">\s*(None|nan|-?inf|Undefined)\b[^<]{0,20}", text)):
        told.append(unset.group())
    if is_page and re.search(r'<div id="controls"[^>]*>\s*</div>', text):
        told.append("an empty card")
    return f"tells {told}" if told else ""
