"""Models run with real masks: sums against loops, how outputs are read, and budgets."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from measurements_by_hand import k_sweep_tables
from torch import nn

import semdiag
from semdiag.capturing.attention_calls import watch_attention
from semdiag.capturing.loading import LoadedModel
from semdiag.capturing.sparsify import RandomK, TopK, sparsify
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import Conditions
from semdiag.measuring.survey import survey
from semdiag.measuring.table import column_types
from semdiag.questions.k_sweep.budgets import NeededKeys, greedy, masks_of
from semdiag.questions.k_sweep.changes import budget_content
from semdiag.questions.k_sweep.measure import KSweepPlan
from semdiag.questions.k_sweep.rerun import RERUN_TABLE, mean_change, measure_of, rerun
from semdiag.questions.k_sweep.wording import sparse_verdict, verdict_lines
from semdiag_files import InputError
from semdiag_models import Encoder

LETTERS, LENGTH = 7, 10


class Causal(nn.Module):
    """One block of causal attention, to the logits of the next token."""

    def __init__(self, columns=LETTERS, causal=True, width=16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width)
        self.qkv, self.head, self.causal = nn.Linear(width, 3 * width), nn.Linear(width, columns), causal

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        q, k, v = (3 * part for part in self.qkv(x)[:, None].chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.head(x + mixed[:, 0])


def made(kind=Causal, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(**options).double().eval()


def ids(samples=9):
    return torch.randint(LETTERS, (samples, LENGTH), generator=torch.Generator().manual_seed(1))


def loaded(module, **more):
    return LoadedModel("own:model", "", module, "factory", "unknown", **more)


def run(module, batches):
    return rerun(loaded(module), batches, None, [("topk", 2, TopK(2))])


def test_the_sums_of_an_encoder_are_those_of_the_encoder_made_with_top_k(wild_encoder, padded_tokens):
    encoder, (tokens, labels) = wild_encoder("full", 0.7), padded_tokens
    again = rerun(replace(loaded(encoder), source="python"), [tokens[:4], tokens[4:]], labels, masks_of([2], 0))
    assert column_types(again) == RERUN_TABLE.columns
    other = Encoder(replace(encoder.config, attention="topk", k=2)).double().eval()
    other.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        p, q = (one(tokens).log_softmax(-1) for one in (encoder, other))
    for mask, said in (("none", p), ("topk", q)):
        rows = again[again["mask"] == mask].sort_values("sample").reset_index(drop=True)
        for i in range(7):
            row = rows.loc[i]
            assert (row["targets"], row["predictions"], row["classes"]) == (1, 1, 2)
            assert row["loss"] == pytest.approx(-said[i, labels[i]].item(), rel=1e-9)
            assert row["correct"] == (said[i].argmax() == labels[i])
            assert row["changed"] == (said[i].argmax() != p[i].argmax())
            kl = sum(math.exp(a) * (a - b) for a, b in zip(p[i].tolist(), said[i].tolist(), strict=True))
            assert row["divergence"] == pytest.approx(kl, abs=1e-9)
    assert sorted(again["mask"].unique()) == ["none", "random", "topk"]
    want = np.mean([(p - q)[i, labels[i]].item() for i in range(7)])
    assert measure_of(again) == "loss"
    assert mean_change(again, "topk", 2)[0] == pytest.approx(want, rel=1e-9)


def test_the_upper_end_is_that_of_a_ratio_of_sums():
    again = run(made(), [ids(30)])
    rows = {mask: again[again["mask"] == mask].sort_values("sample") for mask in ("none", "topk")}
    change = (rows["topk"]["loss"].to_numpy() - rows["none"]["loss"].to_numpy()) / (LENGTH - 1)
    want = change.mean() + 2 * change.std(ddof=1) / math.sqrt(30)  # as many targets in each sample
    assert mean_change(again, "topk", 2)[1] == pytest.approx(want, rel=1e-9)


def test_a_causal_model_is_judged_by_its_next_tokens():
    model, tokens = made(), ids()
    again = run(model, [tokens[:5], tokens[5:]])
    with torch.no_grad(), sparsify(model, TopK(2)):
        said = model(tokens).log_softmax(-1)
    rows = again[again["mask"] == "topk"].set_index("sample")
    for i in range(len(tokens)):
        loss = -sum(said[i, t, tokens[i, t + 1]].item() for t in range(LENGTH - 1))
        assert rows.loc[i, "loss"] == pytest.approx(loss, rel=1e-9)
        assert (rows.loc[i, "targets"], rows.loc[i, "predictions"]) == (LENGTH - 1, LENGTH)


@pytest.mark.parametrize(
    ("model", "measure"),
    [
        (
            lambda: made(causal=False),
            "output_change",
        ),  # the last token is seen by all: its logits tell the next one
        (lambda: made(columns=LETTERS + 1), "output_change"),  # hidden states, not one column a token
        (lambda: made(columns=LENGTH), "output_change"),  # hidden states as wide as there are positions
    ],
)
def test_what_predicts_no_next_token_is_judged_by_its_outputs(model, measure):
    model, tokens = model(), ids()
    again = run(model, [tokens])
    assert again["targets"].sum() == 0
    with torch.no_grad():
        before = model(tokens)
        with sparsify(model, TopK(2)):
            change = (model(tokens) - before).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)
    assert measure_of(again) == measure
    assert mean_change(again, "topk", 2)[0] == pytest.approx(change.mean().item(), rel=1e-9)


class Padded(Causal):
    """No token attends to padding but padding to itself, whose outputs may be set to zeros."""

    def __init__(self, zeros=False, **options):
        super().__init__(**options)
        self.zeros = zeros

    def forward(self, ids, attention_mask=None, hidden_from_us=None):
        real = (hidden_from_us if attention_mask is None else attention_mask).bool()
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        q, k, v = (3 * part for part in self.qkv(x)[:, None].chunk(3, -1))
        seen = real[:, None, None] | torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
        seen = seen.tril() if self.causal else seen
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.expand(-1, -1, ids.shape[1], -1))
        said = self.head(x + mixed[:, 0])
        return said * real[..., None] if self.zeros else said


def padded(lengths, side="right"):
    places = torch.arange(LENGTH)[None]
    real = (places if side == "right" else LENGTH - 1 - places) < torch.tensor(lengths)[:, None]
    return {"ids": ids(len(lengths)) * real, "attention_mask": real.long()}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_what_predicts_the_next_token_is_told_where_every_sample_is_padded(causal, zeros, side):
    lengths = [6, 4, 1, 8, 2]
    again = run(made(Padded, causal=causal, zeros=zeros), [padded(lengths, side)])
    rows = again[again["mask"] == "none"]
    assert rows["targets"].tolist() == ([n - 1 for n in lengths] if causal else [0] * 5)
    assert rows["predictions"].tolist() == (lengths if causal else [0] * 5)


def test_padding_of_which_nothing_is_known_makes_no_next_token():
    batch = padded([6, 9, 8])
    again = run(made(Padded, causal=False), [{"ids": batch["ids"], "hidden_from_us": batch["attention_mask"]}])
    assert again["targets"].sum() == 0


def test_where_no_sample_has_two_tokens_nothing_is_said_of_the_next():
    again = run(made(Padded), [padded([1, 1, 1])])
    assert again[["targets", "predictions"]].sum().tolist() == [0, 0]


def test_the_body_of_a_language_model_has_no_logits_however_wide():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, **sizes)  # as wide as the vocabulary
    for kind, count in ((transformers.LlamaModel, 0), (transformers.LlamaForCausalLM, LENGTH - 1)):
        again = run(kind(config).double().eval(), [{"input_ids": ids(2)}])
        assert again["targets"].tolist() == [count] * 4


def test_a_changed_token_that_the_model_refuses_tells_nothing():
    class Ends(Causal):
        def forward(self, ids):
            if not (ids[:, -1] == 0).all():
                raise ValueError("every text ends with 0")
            return super().forward(ids)

    again = run(made(Ends), [torch.cat([ids()[:, 1:], torch.zeros(9, 1, dtype=torch.int64)], 1)])
    assert again["targets"].sum() == 0


def test_labels_of_a_batch_and_padding_are_respected():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=LETTERS, **sizes, initializer_range=0.5)
    model = transformers.LlamaForCausalLM(config).double().eval()
    batch = {"input_ids": ids(3), "attention_mask": torch.ones(3, LENGTH, dtype=torch.int64)}
    batch["attention_mask"][0, :4] = 0
    again = run(model, [batch])
    assert again[again["mask"] == "none"]["targets"].tolist() == [5, 9, 9]
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[1] = -100
    with_labels = run(model, [{**batch, "labels": labels}])
    rows = with_labels[with_labels["mask"] == "none"]
    assert rows["targets"].tolist() == [
        6,
        0,
        9,
    ]  # the first real token has no reader but padding, as in transformers
    with torch.no_grad():
        own = model(**batch, labels=labels).loss
    assert rows["loss"].sum() / rows["targets"].sum() == pytest.approx(own.item(), rel=1e-5)


def test_a_model_whose_output_holds_no_numbers_is_refused():
    class Odd(Causal):
        def forward(self, tokens):
            super().forward(tokens)
            return "done"

    with pytest.raises(InputError, match="holds no tensor"):
        run(made(Odd), [ids()])


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (lambda y: y.argmax(-1), "a tensor of int64, holds no tensor of floating-point numbers"),
        (lambda y: torch.fft.fft(y), "a tensor of complex128, holds no tensor of floating-point numbers"),
        (lambda y: y.sum(), r"of shape \(\), has no axis of the batch's samples, 9"),
        (lambda y: y.flatten(0, 1), r"of shape \(90, 7\), has no axis of the batch's samples, 9"),
    ],
)
def test_an_output_without_an_axis_of_samples_or_real_numbers_is_refused(output, said):
    class Odd(Causal):
        def forward(self, tokens):
            return output(super().forward(tokens))

    with pytest.raises(InputError, match=said):
        run(made(Odd), [ids()])


@pytest.mark.parametrize("options", [{}, {"columns": LETTERS + 1}])  # judged by next tokens, and by its outputs
def test_an_output_with_its_sequence_first_is_read_as_with_its_samples_first(options):
    class Turned(Causal):
        def forward(self, tokens):
            return super().forward(tokens).transpose(0, 1)

    batches = [ids()[:4], ids()[4:]]
    again = run(made(Turned, **options), batches)
    assert again.equals(run(made(**options), batches))
    assert again["sample"].tolist() == [*range(4)] * 2 + [*range(4, 9)] * 2


def test_attention_that_cannot_be_masked_stops_a_rerun():
    class Odd(Causal):
        def forward(self, tokens):
            x = self.tokens(tokens)
            return super().forward(tokens) + self.head((-torch.cdist(x, x)).softmax(-1) @ x)

    with pytest.raises(InputError, match="softmax"):
        run(made(Odd), [ids()])


# ------------------------------------------------------------------------------------------------- budgets


def test_needed_keys_are_those_of_sorted_weights():
    model, tokens, calls, needed = made(), ids(), [], NeededKeys(min_keys=3)
    with torch.no_grad(), watch_attention(model, lambda call: (calls.append(call), needed.add(call))):
        model(tokens)
    (call,) = calls
    scores = call.part().scores(torch.float64)
    found = []
    for level in (0.5, 0.9, 0.99):
        wants = []
        for b in range(len(tokens)):
            for i in range(2, LENGTH):
                p = scores[b, 0, i, : i + 1].softmax(-1).sort(descending=True).values.tolist()
                wants.append(next(n for n in range(1, i + 2) if sum(p[:n]) >= level - 1e-12))
        wants.sort()
        found.append(wants[math.ceil(0.95 * len(wants)) - 1])
        assert needed.smallest(level) == {("", 0): [found[-1]]}
    assert found == sorted(found)
    assert needed.blocks == [1]


def test_of_a_mask_of_its_own_no_more_keys_are_needed_than_it_keeps(wild_encoder, padded_tokens):
    encoder, needed = wild_encoder("topk"), NeededKeys()
    with torch.no_grad(), watch_attention(encoder, needed.add):
        encoder(padded_tokens[0])
    assert max(k for numbers in needed.smallest(0.999).values() for k in numbers) == encoder.config.k


def test_a_greedy_budget_stays_within_its_tolerance_and_is_smaller_than_the_start():
    needed = NeededKeys()
    needed.layers = {("a", 0): 0, ("b", 0): 1}
    for place, factor in ((("a", 0), 1), (("b", 0), 3)):
        for step, level in enumerate((0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)):
            counts = np.zeros((1, 60), np.int64)
            counts[0, (step + 1) * factor] = 1
            needed.counts[place, 1, level] = counts

    def cost(budget):  # only the first place matters
        return max(0, 6 - budget["a", 0][0])

    # 6 would do, 5 was refused, so it keeps a step more; nothing was refused to the other.
    assert greedy(needed, cost, 0.5, 100) == {("a", 0): [7], ("b", 0): [1]}
    assert greedy(needed, lambda budget: 1.0, 0.5, 100) is None


def test_blocks_are_counted_where_there_are_several():
    needed, generator = NeededKeys(), torch.Generator().manual_seed(0)

    class Long(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

    q, k = torch.randn(1, 2, 3, 4, generator=generator), torch.randn(1, 2, 150, 4, generator=generator)
    model, calls = Long(), []
    with torch.no_grad(), watch_attention(model, lambda call: (calls.append(call), needed.add(call))):
        model(q, k)
    weights = calls[0].scores(torch.float64).softmax(-1)
    assert needed.blocks == [1, 64, 128]
    for block, parts in ((64, (64, 64, 22)), (128, (128, 22))):
        sums = (
            torch.stack([part.sum(-1) for part in weights.split(parts, -1)], -1).sort(-1, descending=True).values
        )
        most = (1 + (sums.cumsum(-1) < 0.8).sum(-1)).amax(-1)[0].tolist()
        assert needed.smallest(0.8, block) == {("", 0): most}


@pytest.mark.slow
def test_a_budget_file_reproduces_the_stated_loss(tmp_path):
    model, tokens = made(), ids(40)
    plan = KSweepPlan(4, rerun=True, budget=True, tolerance=0.1)
    found = survey([loaded(model, batches=[tokens])], Conditions(plans=(plan,), dtype="float64"))
    content = budget_content(Findings(found), "own:model")
    path = tmp_path / "budget.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert content["schema"] == "semdiag.budget/1"
    assert list(content["budgets"]) == ["weight-95", "weight-99", "loss"]
    for name, budget in content["budgets"].items():
        first, last = budget["tested"]["samples"]
        assert (first, last) == (20, 39)
        assert budget["chosen"] == {"samples": [0, 19]}
        keep = semdiag.read_budget(path, name)
        assert keep == {("", 0): TopK(tuple(budget["layers"][0]["k"]))}
        (k,) = budget["layers"][0]["k"]  # of queries with 1, 2, … keys
        assert budget["share"] == sum(min(k, n) for n in range(1, LENGTH + 1)) / sum(range(1, LENGTH + 1))
        own = tokens[first : last + 1]
        with torch.no_grad():
            before = F.cross_entropy(model(own)[:, :-1].flatten(0, 1), own[:, 1:].flatten()).item()
            with sparsify(model, keep):
                after = F.cross_entropy(model(own)[:, :-1].flatten(0, 1), own[:, 1:].flatten()).item()
        assert budget["tested"]["without_mask"] == pytest.approx(before, rel=1e-9)
        assert budget["tested"]["change"] == pytest.approx(after - before, abs=1e-9)
    said = " ".join(verdict_lines(Findings(found), "own:model"))
    assert (
        "chosen on samples 0 to 19 and run on 20 to 39, which had no part in the choice: weight-95 keeps" in said
    )
    assert semdiag.read_budget(path) == semdiag.read_budget(path, "loss")
    with pytest.raises(InputError, match="no budget called weight-50"):
        semdiag.read_budget(path, "weight-50")
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="is not a budget"):
        semdiag.read_budget(path)


@pytest.mark.slow
def test_nothing_of_the_samples_on_which_a_budget_is_run_goes_into_its_choice():
    """Half of them changed: the same budgets, another stated loss; the other half changed: other budgets."""
    plan = KSweepPlan(4, rerun=True, budget=True, tolerance=0.1, ks=(4,))
    tokens, other = ids(40), torch.randint(LETTERS, (20, LENGTH), generator=torch.Generator().manual_seed(7))
    inputs = tokens, torch.cat([tokens[:20], other]), torch.cat([other * 0, tokens[20:]])
    same, again, changed = (k_sweep_tables(made(), x, None, plan, dtype=torch.float64) for x in inputs)
    assert again["budgets"].equals(same["budgets"])
    assert not changed["budgets"].equals(same["budgets"])
    runs = [found["rerun"][found["rerun"]["mask"].isin(("weight-95", "loss"))] for found in (same, again)]
    assert sorted(runs[0]["sample"].unique()) == list(range(20, 40))
    assert not np.allclose(runs[0]["loss"], runs[1]["loss"])


@pytest.mark.parametrize(("batches", "fewest"), [([15], 7), ([20], 10), ([9, 9], 9)])
def test_samples_that_are_too_few_for_two_halves_are_said(batches, fewest):
    plan, given = KSweepPlan(4, rerun=True, budget=True), [ids(size) for size in batches]
    if fewest >= 8:
        assert len(k_sweep_tables(made(), given, None, plan)["budgets"])
        return
    with pytest.raises(InputError, match=f"each of at least 8. Of {sum(batches)} samples one half has {fewest}"):
        k_sweep_tables(made(), given, None, plan)


def test_a_batch_of_arguments_is_not_cut_in_two():
    plan = KSweepPlan(4, rerun=True, budget=True)
    with pytest.raises(InputError, match="Of 40 samples one half has 0"):
        k_sweep_tables(made(), [(ids(40),)], None, plan)


class OfFeatures(nn.Module):
    """Takes its arguments in one dictionary."""

    def __init__(self):
        super().__init__()
        self.inner = Padded()

    def forward(self, features):
        return self.inner(**features)


def test_a_dictionary_as_one_argument_is_read_as_arguments_are():
    batch, model = padded([2, 9, 4, 10]), made(OfFeatures)
    several, one = run(model.inner, [batch]), run(model, [(batch,)])
    assert several["targets"].sum() > 0
    pd.testing.assert_frame_equal(one, several)


def test_no_forward_is_repeated():
    """One of each batch without a mask, one for each mask; and two of one sample, to see whether it looks back."""
    model, sizes = made(Padded), []
    model.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    batches = [padded([LENGTH] * 3), padded([LENGTH] * 2)]
    masks = [("topk", 2, TopK(2)), ("topk", 4, TopK(4)), ("random", 2, RandomK(2))]
    found = rerun(loaded(model), batches, None, masks)
    assert found["targets"].sum() > 0
    assert sorted(sizes) == [1] * 2 + [2] * (1 + len(masks)) + [3] * (1 + len(masks))


class OfLengths(nn.Module):
    """Knows from lengths what is padding, and tells its parts."""

    def __init__(self, pooled=False):
        super().__init__()
        self.inner, self.pooled = Padded(causal=False), pooled

    def forward(self, ids, lengths):
        found = self.inner(ids, attention_mask=torch.arange(LENGTH) < lengths[:, None])
        return found.mean(1) if self.pooled else found


@pytest.mark.parametrize(("pooled", "lengths"), [(False, [2, 9]), (False, [LENGTH] * 2), (True, [2, 9])])
def test_outputs_at_padding_that_the_inputs_do_not_tell_count_and_it_is_said(pooled, lengths):
    """The same change with the mask among the inputs leaves these positions out."""
    batch, said, masks = padded(lengths), [], [("topk", 2, TopK(2))]
    rerun(
        loaded(made(OfLengths, pooled=pooled)),
        [(batch["ids"], torch.tensor(lengths))],
        None,
        masks,
        remark=lambda text, code: said.append(text),
    )
    expected = not pooled and min(lengths) < LENGTH
    assert [text.startswith("outputs at padding count in its changes") for text in said] == [True] * expected
    said.clear()
    rerun(loaded(made(Padded, causal=False)), [batch], None, masks, remark=lambda text, code: said.append(text))
    assert not said


class Towers(nn.Module):
    """Two outputs, as those of a model of pictures and texts; a number beside them."""

    def __init__(self, named):
        super().__init__()
        self.one, self.two, self.named = Causal(causal=False), Causal(causal=False), named

    def forward(self, ids, scale=1.0):
        found = {"loss": None, "pictures": self.one(0 * ids), "scale": torch.tensor(2.0), "texts": self.two(ids)}
        return found if self.named else tuple(found.values())


@pytest.mark.parametrize(
    ("named", "text"),
    [(True, "pictures alone is compared, not texts"), (False, "number 2 alone is compared, not number 4")],
)
def test_outputs_that_are_not_compared_are_named(named, text):
    """What masks do to the texts was left out, without a word."""
    said = []
    rerun(
        loaded(made(Towers, named=named)),
        [ids()],
        None,
        masks_of([2], 0),
        remark=lambda text, code: said.append(text),
    )
    assert said == [f"of its outputs {text}"]


class Shuffled(Causal):
    """Sees its tokens in an order that every forward draws anew, as masked autoencoders draw their patches."""

    def __init__(self):
        super().__init__(causal=False)

    def forward(self, ids):
        return super().forward(ids[:, torch.randperm(LENGTH)])


def test_what_a_forward_draws_is_no_change_by_a_mask():
    """Two runs without any mask differ by more than 1, and every k was said to cost as much."""
    said, model = [], made(Shuffled)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert (model(ids()) - model(ids())).norm() > 1
        table = rerun(
            loaded(model),
            [ids()[:4], ids()[4:]],
            None,
            masks_of([3, LENGTH], 0),
            remark=lambda text, code: said.append(text),
        )
    assert not table.loc[table["k"] == LENGTH, "output_change"].any()
    assert (table.loc[table["k"] == 3, "output_change"] > 0).all()
    (text,) = said
    assert text.startswith("its forward pass draws random numbers in evaluation mode")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_gets_its_verdict(dtype):
    """numpy knows no bfloat16: the verdict ended in a ValueError."""
    found = semdiag.k_sweep(made().to(dtype), ids(), plan=KSweepPlan(4, rerun=True, ks=(2,)))
    assert found.provenance["dtype"] == str(dtype).removeprefix("torch.")
    assert len(semdiag.summary(found)["verdict"]) >= 3


def test_plans_that_make_no_sense_are_refused():
    for wrong in ({"tolerance": 0.0}, {"ks": (0,)}, {"budget": True}):
        with pytest.raises(InputError):
            KSweepPlan(**wrong)


@pytest.mark.slow
def test_the_untrained_model_of_the_docs_gets_no_answer(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4]))
    plan = KSweepPlan(8, rerun=True, ks=(4,))
    findings = Findings(survey([semdiag.load("docs.causal_model:untrained")], Conditions(plans=(plan,))))
    found = sparse_verdict(findings, "docs.causal_model:untrained")
    assert (found.answer, found.measure) == ("inconclusive", "loss"), found
    assert abs(found.change) < 0.01


@pytest.mark.parametrize("default", [[], {}, 3, None, True])
def test_a_budget_whose_default_is_no_name_is_refused(tmp_path, default):
    path = tmp_path / "budget.json"
    path.write_text(json.dumps({"schema": "semdiag.budget/1", "default": default, "budgets": {"loss": {}}}))
    with pytest.raises(InputError, match="has no budget called"):
        semdiag.read_budget(path)


@pytest.mark.slow
def test_processes_that_divide_the_masks_find_the_same_and_leave_the_generator_the_same():
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")
    sizes = {"vocab_size": LETTERS, "n_positions": 2 * LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = made(transformers.GPT2LMHeadModel, config=transformers.GPT2Config(**sizes))
    found = []
    for jobs in (1, 2):
        remarks = []
        torch.manual_seed(0)
        again = rerun(
            loaded(model), list(ids().split(4)), None, masks_of([3, 6], 0, ("topk", "window", "random")),
            remark=lambda *said, remarks=remarks: remarks.append(said), jobs=jobs,
        )  # fmt: skip
        found.append((again.to_csv(), remarks, torch.get_rng_state().tolist()))
    assert found[0] == found[1]
    assert {*again["mask"]} == {"none", "topk", "window", "random"}


@pytest.mark.slow
def test_a_line_of_a_process_is_the_one_of_this_one(wild_encoder, padded_tokens):
    tokens = padded_tokens[0]
    for jobs in (1, 2):
        with pytest.raises(InputError, match="cannot be run with a mask"):
            rerun(loaded(wild_encoder("full")), [tokens + 99], None, masks_of([1, 2], 0), jobs=jobs)
