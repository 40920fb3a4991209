"""The page of one text in headless Chromium: heads, queries and k are chosen; the numbers are those of loops."""

import math
import warnings

import pytest
import torch
from torch import nn

import semdiag
from semdiag.capturing.attention_calls import watch_attention
from semdiag.measuring.metrics import METRICS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HOSTILE = [
    "</script><script>parent.hacked = 1</script>", "<img src=x onerror='parent.hacked = 2'>", "\u202eback",
    "&amp;", "<!--", "\u05e9\u05dc\u05d5\u05dd", "\U0001f600", "a\nb",
]  # fmt: skip
# Each step chooses a head, a query and a k, by clicks and keys, and reads what is shown.
_DRIVE = """<!DOCTYPE html><meta charset="utf-8">
<iframe id="page" src="look.html" style="border:0;width:WIDTHpx;height:2000px"></iframe><pre id="found"></pre>
<script>
const steps = STEPS;
document.getElementById("page").onload = (event) => {
  const frame = event.target.contentWindow, page = event.target.contentDocument, root = page.documentElement;
  const all = (chosen) => [...page.querySelectorAll(chosen)], text = (part) => part.textContent;
  const found = steps.map(([layer, head, query, k]) => {
    page.querySelector(`.heads button[data-layer="${layer}"][data-head="${head}"]`).click();
    page.querySelector(`#tokens button[data-query="${query}"]`).click();
    const box = page.getElementById("k");
    if (!box.disabled) { box.value = k; box.dispatchEvent(new frame.Event("input")); }
    if (!page.getElementById("more").hidden) page.getElementById("more").click();
    const rows = all("#scores tr[data-key]").map((row) =>
      [+row.dataset.key, row.className, ...[2, 3, 4, 5].map((column) => text(row.cells[column]))]);
    const drop = page.getElementById("more");
    if (text(drop) === "show fewer") drop.click();
    return { title: text(page.getElementById("head-title")), address: frame.location.hash, rows,
      numbers: Object.fromEntries(all("#numbers dd[data-number]").map((one) => [one.dataset.number, text(one)])),
      kept: all("#tokens .kept").map((one) => all("#tokens button").indexOf(one)),
      dropped: all("#tokens .dropped").length, later: all("#tokens .later").length,
      groups: page.getElementById("between").hidden ? null
        : all("#groups tr").map((row) => [...row.cells].map(text)) };
  });
  const outside = all("body *").filter((part) => !part.closest(".wide, .unseen, dialog")
    && part.getBoundingClientRect().right > WIDTH + 0.5);
  document.getElementById("found").textContent = JSON.stringify({ steps: found,
    tokens: all("#tokens button").map(text), scripts: all("script").length, images: page.images.length,
    hacked: window.hacked ?? null, window: root.clientWidth,
    content: Math.max(root.scrollWidth, page.body.scrollWidth),
    outside: outside.map((part) => part.outerHTML.slice(0, 200)),
    asked: frame.performance.getEntriesByType("resource").map((one) => one.name) });
};
</script>"""


_CHOOSE = """<!DOCTYPE html><meta charset="utf-8">
<iframe id="page" src="look.html#1.2.3" style="border:0;width:1280px;height:2000px"></iframe><pre id="found"></pre>
<script>
document.getElementById("page").onload = (event) => {
  const frame = event.target.contentWindow, page = event.target.contentDocument, at = () => frame.location.hash;
  const pressed = (key) => new frame.KeyboardEvent("keydown", { key, bubbles: true });
  const press = (key) => page.activeElement.dispatchEvent(pressed(key));
  const cells = () => [...page.querySelectorAll(".heads button")];
  const found = { address: at() };
  cells().find((cell) => cell.hasAttribute("aria-current")).focus();
  press("ArrowUp"); press("ArrowLeft"); press("ArrowUp");
  found.map = at();
  page.querySelector("#tokens [aria-current]").focus();
  press("ArrowRight"); press("ArrowRight"); press("ArrowLeft");
  found.tokens = at();
  const square = page.getElementById("matrix"), box = square.getBoundingClientRect();
  const point = { clientX: box.left + 2, clientY: box.top + box.height * 5.5 / 8, bubbles: true };
  square.dispatchEvent(new frame.MouseEvent("mousemove", point));
  found.pointed = page.getElementById("pointed").textContent;
  square.dispatchEvent(new frame.MouseEvent("click", point));
  found.square = at();
  found.metrics = [...page.querySelectorAll("#metrics input")].map((radio) => {
    radio.click();
    return cells().map((cell) => cell.title);
  });
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>"""


class Given(nn.Module):
    """Attention over queries and keys that are given: a layer after the other, causal."""

    def __init__(self, layers=2, heads=3, length=8, width=4, spread=1.5):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shape = layers, 3, 1, heads, length, width
        self.register_buffer("qkv", spread * torch.randn(shape, generator=generator, dtype=torch.float64))
        self.layers = nn.ModuleList(Sdpa() for _ in range(layers))

    def forward(self, ids):
        return [layer(*qkv) for layer, qkv in zip(self.layers, self.qkv, strict=True)]


class Sdpa(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def calls_of(model, inputs):
    """The calls of one forward: queries, keys, masks, as tensors."""
    found = []
    with torch.no_grad(), watch_attention(model, found.append):
        model(inputs)
    return found


def by_loops(call, head, query, k):
    """What the page should say of a query, in floats: scores one by one, then sums and extremes."""
    group = call.q.shape[1] // call.k.shape[1]
    q, keys = call.q[0, head, query].tolist(), call.k[0, head // group].tolist()
    part = call.part()
    scores = {}
    for j, key in enumerate(keys):
        if part.allowed is None or bool(
            part.allowed.expand(1, call.q.shape[1], len(call.q[0, 0]), -1)[0, head, query, j]
        ):
            scores[j] = sum(a * b for a, b in zip(q, key, strict=True)) * call.scale
    order = sorted(scores, key=lambda j: (-scores[j], j))
    kept = order[:k]
    if call.selected is not None:
        own = set(call.selected[0, head, query].tolist())
        kept = [j for j in order if j in own]
    dropped = [j for j in order if j not in kept]
    sink = [] if call.sinks is None else [float(call.sinks[head])]
    used = order if call.selected is None else kept
    total = sum(math.exp(scores[j]) for j in order) + sum(map(math.exp, sink))
    mixed = sum(math.exp(scores[j]) for j in used) + sum(map(math.exp, sink))
    shares = [math.exp(z) / mixed for z in [*(scores[j] for j in used), *sink]]
    numbers = {
        "delta": max(scores[j] for j in used) - min(scores[j] for j in used),
        "gap": min(scores[j] for j in kept) - max(scores[j] for j in dropped) if dropped else math.inf,
        "weight_kept": sum(math.exp(scores[j]) for j in kept) / total,
        "lost": sum(math.exp(scores[j]) for j in dropped) / total,
        "entropy": -sum(p * math.log(p) for p in shares if p),
    }
    if call.selected is None:
        numbers["delta-kept"] = max(scores[j] for j in kept) - min(scores[j] for j in kept)
    if sink:
        numbers["sink"] = shares[-1]
    rows = [
        (j, "kept" if j in kept else "dropped", scores[j], math.exp(scores[j]) / total) for j in [*kept, *dropped]
    ]
    return numbers, rows, len(keys) - len(scores)


def received_by_loops(call, head, key):
    """The mean of the weights that a key receives from the queries of a head."""
    weights = []
    for query in range(call.q.shape[2]):
        _, rows, _ = by_loops(call, head, query, 1)
        used = [row for row in rows if call.selected is None or row[1] == "kept"]
        sink = 0 if call.sinks is None else math.exp(float(call.sinks[head]))
        total = sum(math.exp(score) for _, _, score, _ in used) + sink
        weights.append(sum(math.exp(score) for j, _, score, _ in used if j == key) / total)
    return sum(weights) / len(weights)


def same(shown, number):
    """Whether a text says a number: to half a unit of its third digit, a share to half of a tenth of a percent.

    The page's scores are rounded to single precision where the model runs in it: 1e-6 here, far below either.
    """
    if shown == "none dropped":
        return number == math.inf
    if shown == "< 0.1%":
        return number < 0.0005 + 1e-6
    value = float(shown.replace("−", "-").removesuffix("%"))
    if shown.endswith("%"):
        return abs(value / 100 - number) <= 0.0005 + 1e-6
    return abs(value - number) <= 0.005 * abs(number) + 1e-5


def driven(in_browser, page, steps, width=1280):
    """What the page shows at each step."""
    return in_browser(
        page.parent, _DRIVE.replace("WIDTH", str(width)).replace("STEPS", str([list(s) for s in steps]))
    )


def agrees(found, steps, calls):
    for shown, (layer, head, query, k) in zip(found["steps"], steps, strict=True):
        numbers, rows, later = by_loops(calls[layer], head, query, k)
        assert shown["title"] == f"Layer {layer}, head {head}"
        assert shown["address"] == f"#{layer}.{head}.{query}"
        assert set(shown["numbers"]) == set(numbers)
        for name, number in numbers.items():
            assert same(shown["numbers"][name], number), (name, shown["numbers"][name], number)
        assert [row[:2] for row in shown["rows"]] == [list(row[:2]) for row in rows]
        for said, (_, _, score, weight) in zip(shown["rows"], rows, strict=True):
            assert same(said[2], score)
            assert same(said[3], weight)
        said = shown["rows"][0]  # and the weight that its first key receives from all queries
        assert same(said[5], received_by_loops(calls[layer], head, said[0]))
        assert shown["kept"] == sorted(j for j, kind, *_ in rows if kind == "kept")
        assert shown["dropped"] == sum(kind == "dropped" for _, kind, *_ in rows)
        assert shown["later"] == later


@pytest.mark.parametrize("width", [1280, 390])
def test_heads_queries_and_k_are_chosen_and_the_numbers_are_those_of_loops(in_browser, tmp_path, width):
    model, ids = Given(), torch.arange(8)[None]
    page = semdiag.look(model, ids, tmp_path / "look.html", tokens=HOSTILE, k=2)
    steps = [(0, 0, 7, 3), (1, 2, 7, 1), (1, 2, 4, 2), (0, 1, 0, 5), (0, 1, 6, 7), (1, 0, 3, 8)]
    found = driven(in_browser, page, steps, width)
    agrees(found, steps, calls_of(model, ids))
    assert found["window"] == width
    assert found["content"] <= width
    assert found["outside"] == []


def test_groups_give_one_another_what_a_capture_says(in_browser, tmp_path):
    model, ids = Given(), torch.arange(8)[None]
    groups = {"<b>first": [True] + 7 * [False], "rest": [False] + 7 * [True]}
    page = semdiag.look(model, ids, tmp_path / "look.html", groups=groups)
    steps = [(0, 1, 7, 3), (1, 2, 4, 2)]
    found = driven(in_browser, page, steps)
    with torch.no_grad(), semdiag.capture(model, scores=True) as calls:
        model(ids)
    between = calls.weight_between(groups)
    for shown, (layer, head, *_) in zip(found["steps"], steps, strict=True):
        assert shown["groups"][0] == ["", *groups]
        own = between[(between["layer"] == layer) & (between["head"] == head)].set_index(["group", "to"])["weight"]
        for name, *cells in shown["groups"][1:]:
            assert all(same(cell, own[name, to]) for to, cell in zip(groups, cells, strict=True))
    assert (
        driven(in_browser, semdiag.look(model, ids, tmp_path / "look.html"), steps)["steps"][0]["groups"] is None
    )


def test_keys_the_square_and_the_address_choose_too_and_the_map_has_three_measures(in_browser, tmp_path):
    model, ids = Given(), torch.arange(8)[None]
    page = semdiag.look(model, ids, tmp_path / "look.html")
    found = in_browser(page.parent, _CHOOSE)
    assert found["address"] == "#1.2.3"
    assert found["map"] == "#0.1.3"  # there is no layer above the first
    assert found["tokens"] == "#0.1.4"
    assert found["square"] == "#0.1.5"
    (score,) = (row[2] for row in by_loops(calls_of(model, ids)[0], 1, 5, 1)[1] if row[0] == 0)
    query, said = found["pointed"].split(": score ")
    assert query == "query 5 “\u20685\u2069”, key 0 “\u20680\u2069”"
    assert same(said.removesuffix(" nats"), score)
    measured = semdiag.measure(model, [ids])
    spans = measured.queries.groupby(["layer", "head"])["dispersion"].median()
    for (layer, head), labels in zip(spans.index, zip(*found["metrics"], strict=True), strict=True):
        row = measured.heads[(measured.heads["layer"] == layer) & (measured.heads["head"] == head)].iloc[0]
        expected = spans[layer, head], row["entropy"], row["first_weight"]
        for label, name, number in zip(labels, ("δ", "entropy", "weight on the first key"), expected, strict=True):
            place, _, value = label.partition(f": {name} ")
            assert place == f"layer {layer}, head {head}"
            assert same(value.removesuffix(" nats"), number)


_OPEN = """<!DOCTYPE html><meta charset="utf-8">
<iframe id="page" src="look.html#ADDRESS" style="width:1280px;height:2000px"></iframe><pre id="found"></pre>
<script>
document.getElementById("page").onload = (event) => {
  const frame = event.target.contentWindow, page = event.target.contentDocument;
  const metric = page.querySelector("#metrics :checked").dataset.metric;
  const found = { address: frame.location.hash, metric,
    cell: page.querySelector(".heads [aria-current]").title };
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>"""


@pytest.mark.parametrize(
    ("address", "query", "metric"),
    [("1.2", 7, "dispersion"), ("1.2.3", 3, "dispersion"), ("1.2.first_weight", 7, "first_weight")],
)
def test_an_address_opens_the_last_token_and_colours_as_it_says(in_browser, tmp_path, address, query, metric):
    """A causal model's first token sees one key."""
    page = semdiag.look(Given(), torch.arange(8)[None], tmp_path / "look.html", k=2)
    found = in_browser(page.parent, _OPEN.replace("ADDRESS", address))
    assert found["address"] == f"#1.2.{query}"
    assert found["metric"] == metric
    assert METRICS[metric].symbol in found["cell"] or METRICS[metric].label in found["cell"]


def test_hostile_tokens_are_text_and_nothing_is_asked_for(in_browser, tmp_path):
    page = semdiag.look(Given(), torch.arange(8)[None], tmp_path / "look.html", tokens=HOSTILE, k=2)
    found = driven(in_browser, page, [(0, 0, 5, 2)])
    assert found["hacked"] is None
    assert (found["scripts"], found["images"], found["asked"]) == (2, 0, [])
    shown = dict(zip(HOSTILE, found["tokens"], strict=True))
    assert shown.pop("\u202eback") == "\\u202eback"  # a mark that turns what follows is made visible
    assert shown.pop("a\nb") == "a↵b"
    assert all(said == token for token, said in shown.items())


def test_a_head_that_selects_its_keys_shows_its_own(in_browser, tmp_path, tiny_runs):
    model = semdiag.load(tiny_runs.topk)
    tokens = model.default_inputs(1, 0)[0]
    page = semdiag.look(model, tokens, tmp_path / "look.html")
    steps = [(0, 0, 11, 5), (1, 1, 0, 5)]
    agrees(driven(in_browser, page, steps), steps, calls_of(model.module, tokens))


def test_a_learnt_sink_takes_its_weight(in_browser, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.GptOssConfig(
            vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, intermediate_size=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=4,
        )  # fmt: skip
        model = transformers.GptOssModel(config).eval()
        for block in model.layers:
            nn.init.normal_(block.self_attn.sinks)
            nn.init.normal_(block.self_attn.q_proj.weight)
            nn.init.normal_(block.self_attn.k_proj.weight)
    ids = torch.arange(1, 11)[None]
    page = semdiag.look(model, ids, tmp_path / "look.html")
    steps = [(0, 0, 9, 2), (1, 3, 9, 3), (1, 1, 2, 2)]
    found = driven(in_browser, page, steps)
    agrees(found, steps, calls_of(model, ids))
    assert found["steps"][0]["later"] == 6  # a window of four keys
