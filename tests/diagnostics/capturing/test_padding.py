"""Padded queries: a mask of tokens counts for the module that got it, and where it is true of the keys."""

import warnings

import pytest
import torch
from torch import nn

import semdiag

WIDTH, HEADS, LENGTH = 16, 2, 6


def stream(seed=0, length=LENGTH):
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed))


PADDED = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
REAL = (~PADDED).long()


def counted(model, *args, call=None, **kwargs):
    """Number of counted queries by module and occurrence, and the capture."""
    with torch.no_grad(), semdiag.capture(model.eval(), k=1) as calls:
        (call or model)(*args, **kwargs)
    rows = calls.dispersion()
    heads = rows["head"].max() + 1
    return {name: len(part) // heads for name, part in rows.groupby(["module", "call"])["query"]}, calls


def by_module(found):
    return {module: n for (module, _), n in found.items()}


def test_the_source_mask_of_a_transformer_is_the_encoders_alone():
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 16, batch_first=True)
    found, _ = counted(model, stream(), stream(1), src_key_padding_mask=PADDED)
    assert by_module(found) == {
        "encoder.layers.0.self_attn": 9,
        "decoder.layers.0.self_attn": 12,
        "decoder.layers.0.multihead_attn": 12,
    }


def test_the_masks_of_source_target_and_memory_are_kept_apart():
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 16, batch_first=True)
    target = torch.tensor([[False] * 5 + [True], [False] * 6])
    masks = {"src_key_padding_mask": PADDED, "tgt_key_padding_mask": target, "memory_key_padding_mask": PADDED}
    found, _ = counted(model, stream(), stream(1), **masks)
    assert by_module(found) == {
        "encoder.layers.0.self_attn": 9,
        "decoder.layers.0.self_attn": 11,
        "decoder.layers.0.multihead_attn": 11,
    }


def test_a_layer_of_cross_attention_has_a_mask_of_its_keys_only():
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x, y = stream(), stream(1)
    assert [*counted(model, x, y, y, key_padding_mask=PADDED)[0].values()] == [12]
    assert [*counted(model, x, x, x, key_padding_mask=PADDED)[0].values()] == [9]


class Ignoring(nn.Module):
    """Takes a mask and attends to padding all the same."""

    def forward(self, x, attention_mask):
        return (x @ x.mT).softmax(-1) @ x


def test_a_mask_that_is_not_true_of_the_keys_is_said_and_counts_for_nothing():
    found, calls = counted(Ignoring(), stream(), REAL)
    assert [*found.values()] == [12]
    assert "marks padding, but the keys here do not confirm it" in calls.audit["reason"].item()
    assert calls.audit["what"].item() == "remark"


class Masking(nn.Module):
    """Masks its scores with a mask of samples by keys, or of queries by keys, and may look back only."""

    def __init__(self, pairs=False, causal=False):
        super().__init__()
        self.pairs, self.causal = pairs, causal

    def forward(self, x, attention_mask):
        mask = attention_mask if self.pairs else attention_mask[:, None]
        if self.causal:
            mask = mask & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (x @ x.mT).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ x


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
BLOCKS = torch.block_diag(*[torch.ones(2, 2)] * 3).bool()


@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL.mT, BLOCKS])
def test_a_mask_of_queries_by_keys_is_no_padding_of_as_many_samples_as_tokens(mask):
    x = stream()[:1].expand(LENGTH, -1, -1) * torch.arange(1, LENGTH + 1)[:, None, None] / 8
    found, calls = counted(Masking(pairs=True), x, mask)
    assert [*found.values()] == [LENGTH * LENGTH]
    scores = (x @ x.mT).masked_fill(~mask, torch.nan)
    expected = [max(row) - min(row) for row in ([z for z in r if z == z] for r in scores.flatten(0, 1).tolist())]
    assert calls.dispersion()["dispersion"].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert "all queries count" in calls.audit["reason"].item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL.flip(0, 1), CAUSAL[[0, 2, 2, 3, 5, 5]], CAUSAL[[3] * LENGTH]])
def test_padding_of_as_many_samples_as_tokens_is_left_out(mask, causal):
    x = torch.randn(LENGTH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    found, calls = counted(Masking(causal=causal), x, mask)
    assert [*found.values()] == [mask.sum()]
    assert calls.audit.empty


class Folded(nn.Module):
    """Two heads in the batch axis, samples or heads first; or one head, and a class token before the others."""

    def __init__(self, heads_first=False, masked=False, class_token=False, causal=False):
        super().__init__()
        self.heads_first, self.masked, self.class_token, self.causal = heads_first, masked, class_token, causal

    def forward(self, x, attention_mask=None):
        if self.class_token:
            x = torch.cat([x[:, :1], x], 1)
        order = (
            (lambda t: t.repeat(HEADS, 1, 1)) if self.heads_first else (lambda t: t.repeat_interleave(HEADS, 0))
        )
        heads = order(x) if not self.class_token else x
        scores = heads @ heads.mT
        if self.masked:
            scores = scores.masked_fill(~order(attention_mask.bool()[:, None]), -torch.inf)
        if self.causal:
            scores = scores.masked_fill(~CAUSAL, -torch.inf)
        return scores.softmax(-1) @ heads


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("told", ["real", "attention_mask"])
def test_the_keys_of_folded_heads_tell_which_rows_are_padded(heads_first, told):
    model = Folded(heads_first, masked=True)
    given = {"real": REAL} if told == "real" else {}
    with semdiag.capture(model, k=1, **given) as calls:
        model(stream(), REAL)
    sizes = calls.dispersion().groupby("sample").size().tolist()
    assert sizes == ([6, 3] * HEADS if heads_first else [6] * HEADS + [3] * HEADS)
    assert calls.audit["reason"].str.startswith("its batch axis holds 2 rows per sample").tolist() == [True]


@pytest.mark.parametrize(
    ("model", "real", "rows", "why"),
    [
        (Folded(), REAL, 24, "it has 2 samples, but the batch axis has 4 rows"),
        (Folded(causal=True), REAL, 24, "it has 2 samples, but the batch axis has 4 rows"),
        (Folded(heads_first=True), REAL, 24, "it has 2 samples, but the batch axis has 4 rows"),
        (Folded(class_token=True), REAL, 14, "it has 6 tokens, but there are 7"),
        (Folded(class_token=True), REAL[:1, :4], 14, "it has 4 tokens, but there are 7"),
    ],
)
def test_a_mask_of_the_user_that_fits_no_queries_is_never_ignored_in_silence(model, real, rows, why):
    with semdiag.capture(model, k=1, real=real) as calls:
        model(stream())
    assert calls.audit["reason"].tolist()[0] == f"real is not applied here: {why}"
    assert len(calls.dispersion()) == rows
    if len(real) == 2:
        with pytest.raises(semdiag.InputError, match=f"^real fits no attention of model: {why}\\.$"):
            semdiag.measure(model, stream(), real=real)


def test_a_mask_of_the_user_is_that_of_the_attention_it_fits():
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 16, batch_first=True)
    found = semdiag.measure(model, [(stream(), stream(1, 4))], real=REAL)
    assert found.queries.groupby("layer").size().tolist() == [9 * HEADS, 8 * HEADS, 8 * HEADS]
    said = found.remarks[found.remarks["text"].str.startswith("real")]
    assert said["text"].unique().tolist() == ["real is not applied here: it has 6 tokens, but there are 4"]
    assert len(said) == 2


@pytest.mark.parametrize("real", [REAL[0], [[1, 1]], "ones", REAL.numpy()])
def test_a_mask_of_the_user_is_a_tensor_of_two_axes(real):
    for run in (
        lambda: semdiag.measure(Folded(), stream(), real=real),
        semdiag.capture(Folded(), real=real).__enter__,
    ):
        with pytest.raises(
            semdiag.InputError, match=r"^real must be a tensor \(samples, tokens\), true where"
        ) as refused:
            run()
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_mask_of_the_user_has_a_row_for_every_sample(rows):
    real = torch.ones(rows, LENGTH, dtype=torch.bool)
    message = f"^real must have one row per sample. Got {rows} rows? for 2 samples.$"
    for batches in (stream(), (batch for batch in stream().split(1))):
        with pytest.raises(semdiag.InputError, match=message):
            semdiag.measure(Folded(), batches, real=real)
    assert len(semdiag.measure(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), [(stream(),) * 3], samples=2,
                               real=torch.ones(3, LENGTH)).queries) == 2 * LENGTH * HEADS  # fmt: skip


class Unnamed(nn.Module):
    """Two heads; adds or fills in a mask whose name says nothing."""

    def __init__(self, filled=True):
        super().__init__()
        self.filled = filled

    def forward(self, x, seen):
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        if not self.filled:
            return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=seen)
        return (q @ q.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ q


KEYS = REAL.bool()[:, None, None]


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize(
    ("seen", "place"),
    [
        (KEYS, "last"),
        (KEYS.expand(-1, HEADS, LENGTH, -1), "last"),
        (KEYS & CAUSAL, "last"),
        (KEYS.flip(3), "first"),
    ],
)
def test_padding_in_a_mask_of_an_unknown_name_is_pointed_out(seen, place, filled):
    found, calls = counted(Unnamed(filled), stream(), seen)
    assert [*found.values()] == [12]
    assert (
        calls.audit["reason"]
        .item()
        .startswith(f"the {place} keys of some samples are hidden from all queries: if")
    )
    model, real = Unnamed(filled), REAL if place == "last" else REAL.flip(1)
    with semdiag.capture(model, real=real) as calls:
        model(stream(), seen)
    assert len(calls.dispersion()) == HEADS * 9
    assert calls.audit.empty


WINDOWS = (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).abs() < 2


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize(
    "seen",
    [
        CAUSAL,
        BLOCKS,
        WINDOWS,
        CAUSAL & WINDOWS,
        torch.ones(LENGTH, LENGTH, dtype=torch.bool),
        torch.stack([BLOCKS, WINDOWS])[:, None],  # another mask for each sample
        torch.stack([CAUSAL, CAUSAL.mT])[:, None],
        torch.tensor([1, 1, 0, 1, 1, 1]).bool().expand(LENGTH, -1),  # a key between others
        KEYS[1:],  # one for all samples
        torch.stack([CAUSAL[-1].expand(LENGTH, -1), CAUSAL[3].expand(LENGTH, -1)])[None],  # another for each head
    ],
)
def test_other_masks_are_not_taken_for_padding(seen, filled):
    found, calls = counted(Unnamed(filled), stream(), seen)
    assert [*found.values()] == [12]
    assert calls.audit.empty


class Named(nn.Module):
    """Two heads that forbid what a mask under a well-known name forbids, of any number of axes."""

    def forward(self, x, attention_mask):
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=attention_mask)


GLOBAL = WINDOWS | torch.eye(LENGTH, dtype=torch.bool)[0] | torch.eye(LENGTH, dtype=torch.bool)[:, :1]
OPENED = KEYS.flip(3) & CAUSAL
OPENED = OPENED | ~OPENED.any(3, keepdim=True)  # transformers lets queries without a key see everything


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (KEYS, REAL),
        (KEYS.expand(-1, HEADS, LENGTH, -1), REAL),
        (KEYS & CAUSAL, REAL),
        (OPENED, REAL.flip(1)),
        (KEYS & CAUSAL & WINDOWS, REAL),
        ((CAUSAL | (torch.arange(LENGTH) < 3))[None, None].repeat(2, 1, 1, 1), torch.ones(2, LENGTH)),  # a prefix
        (BLOCKS[None, None].repeat(2, 1, 1, 1), torch.ones(2, LENGTH)),  # documents packed into a sample
        (GLOBAL[None, None].repeat(2, 1, 1, 1), torch.ones(2, LENGTH)),  # a token that sees all, and is seen
    ],
)
@pytest.mark.parametrize("added", [False, True])
def test_a_mask_of_four_axes_tells_padding_by_what_queries_see(seen, expected, added):
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min) if added else seen
    model = Named()
    with semdiag.capture(model, k=1) as calls:
        model(stream(), mask)
    rows = calls.dispersion()
    assert calls.audit.empty
    assert rows.loc[rows["head"] == 0, ["sample", "query"]].to_numpy().tolist() == expected.nonzero().tolist()


def test_a_mask_of_one_axis_is_that_of_tokens_without_samples():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True), 1)
    found, calls = counted(encoder, stream()[1], src_key_padding_mask=PADDED[1])
    assert [*found.values()] == [3]
    assert calls.audit.empty


class Padding(nn.Module):
    """Marks padding where the name is usually read as marking real tokens."""

    def forward(self, x, padding_mask):
        return (x @ x.mT).masked_fill(padding_mask[:, None], -torch.inf).softmax(-1) @ x


@pytest.mark.parametrize(("mask", "rows"), [(PADDED, 9), (torch.zeros_like(PADDED), 12), (PADDED.flip(1), 9)])
def test_the_keys_tell_which_of_its_values_a_mask_has_for_padding(mask, rows):
    found, calls = counted(Padding(), stream(), mask)
    assert [*found.values()] == [rows]
    assert calls.audit["reason"].item().startswith("padding_mask is read as true for padding")


def test_padding_on_the_left_that_a_causal_attention_ignores_is_not_read_the_other_way():
    class Causal(nn.Module):
        def forward(self, x, attention_mask):
            return (x @ x.mT).masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ x

    found, calls = counted(Causal(), stream(), REAL.flip(1))
    assert [*found.values()] == [12]
    assert "marks padding, but the keys here do not confirm it" in calls.audit["reason"].item()


class Sequences(nn.Module):
    """An encoder's, a decoder's and a cross-attention; the masks of both sequences are given to the whole."""

    def __init__(self):
        super().__init__()
        self.enc, self.dec, self.cross = (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(3))

    def forward(self, src, tgt, src_key_padding_mask=None, tgt_key_padding_mask=None):
        src = self.enc(src, src, src, key_padding_mask=src_key_padding_mask)[0]
        tgt = self.dec(tgt, tgt, tgt, key_padding_mask=tgt_key_padding_mask, attn_mask=~CAUSAL)[0]
        return self.cross(tgt, src, src, key_padding_mask=src_key_padding_mask)[0]


@pytest.mark.parametrize(("target", "rows"), [(PADDED.roll(1, 0), 9), (None, 12)])
def test_queries_of_a_cross_attention_are_those_of_the_target(target, rows):
    found, calls = counted(Sequences(), stream(), stream(1), PADDED, target)
    assert by_module(found) == {"enc": 9, "dec": rows, "cross": rows}
    samples = calls.dispersion().groupby(["module", "sample"]).size().unstack() // HEADS
    assert samples.loc["cross"].tolist() == ([3, 6] if target is not None else [6, 6])


class Crossing(nn.Module):
    """Attends to another sequence with a mask that may be either's."""

    def forward(self, x, context, attention_mask):
        return (x @ context.mT).masked_fill(~attention_mask[:, None].bool(), -torch.inf).softmax(-1) @ context


@pytest.mark.parametrize("model", [Crossing(), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)])
def test_a_mask_that_may_be_that_of_other_keys_counts_for_nothing_and_a_remark_says_so(model):
    given = (REAL,) if isinstance(model, Crossing) else (stream(1), PADDED)
    found, calls = counted(model, stream(), stream(1), *given)
    assert [*found.values()] == [12]
    assert "may belong to the keys, which are another sequence than the queries" in calls.audit["reason"].item()


def test_an_attention_to_its_own_tokens_worked_out_twice_is_no_cross_attention():
    model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    found, calls = counted(model, stream() + 1, stream() + 1, stream(), key_padding_mask=PADDED)
    assert [*found.values()] == [9]
    assert calls.audit.empty


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")

SHAPE = {"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}  # fmt: skip
IDS = torch.randint(3, 50, (2, LENGTH), generator=torch.Generator().manual_seed(0))
DECODERS = {
    "Bart": transformers.BartConfig(**SHAPE, forced_eos_token_id=None),
    "Marian": transformers.MarianConfig(**SHAPE, decoder_vocab_size=60, forced_eos_token_id=None),
    "T5": transformers.T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_decoder_layers=1,
                                num_heads=2, pad_token_id=0, decoder_start_token_id=0),
}  # fmt: skip
CLASSES = {"Bart": "BartForConditionalGeneration", "Marian": "MarianMTModel", "T5": "T5ForConditionalGeneration"}
quiet = pytest.mark.filterwarnings("ignore")


def built(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, CLASSES[name])(DECODERS[name])


@quiet
@pytest.mark.parametrize("name", DECODERS)
def test_with_labels_the_decoder_has_no_padding(name):
    found, _ = counted(built(name), input_ids=IDS, attention_mask=REAL, labels=IDS)
    assert sorted(by_module(found).values()) == [9, 12, 12]
    assert {n for module, n in by_module(found).items() if "decoder" in module} == {12}


@quiet
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoders_own_mask_is_that_of_its_self_and_cross_attention(name):
    own = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    masks = {"attention_mask": REAL, "decoder_attention_mask": own}
    found, _ = counted(built(name), input_ids=IDS, decoder_input_ids=IDS, **masks)
    assert {"decoder" in module: n for module, n in by_module(found).items()} == {False: 9, True: 10}


@quiet
@pytest.mark.parametrize("name", DECODERS)
def test_generate_runs_the_encoder_by_itself_and_its_padding_is_known(name):
    model = built(name)
    options = {"attention_mask": REAL, "max_new_tokens": 3, "do_sample": False}
    found, _ = counted(model, input_ids=IDS, call=model.generate, **options)
    encoder = {n for module, n in by_module(found).items() if "decoder" not in module}
    assert encoder == {9}
    assert {n for module, n in by_module(found).items() if "decoder" in module} == {2}


@quiet
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_padding_on_the_left_is_left_out_of_a_generation(cache, kind):
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=kind)
    options = {"attention_mask": REAL.flip(1), "max_new_tokens": 3, "do_sample": False, "disable_compile": True}
    found, _ = counted(model, IDS, call=model.generate, cache_implementation=cache, **options)
    assert [*found.values()] == [9, 2, 2]


@quiet
def test_learned_queries_are_not_padded_where_there_are_as_many_as_tokens():
    config = transformers.PerceiverConfig(
        num_latents=LENGTH, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=1, vocab_size=60,
        num_self_attention_heads=2, num_cross_attention_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    found, _ = counted(transformers.PerceiverModel(config), torch.randn(2, LENGTH, 16), attention_mask=REAL)
    assert {*found.values()} == {12}


@quiet
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generating_with_a_window_finds_the_padding_without_an_alarm(cache):
    config = transformers.MistralConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, sliding_window=4, pad_token_id=0,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config)
    options = {"attention_mask": REAL.flip(1), "max_new_tokens": 3, "do_sample": False, "disable_compile": True}
    found, calls = counted(model, IDS, call=model.generate, cache_implementation=cache, **options)
    assert [*found.values()] == [9, 2, 2]
    assert calls.audit.empty


@quiet
def test_as_many_patches_as_tokens_are_not_padded():
    text = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_position_embeddings": 16, "eos_token_id": 2}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 10, "patch_size": 2}  # fmt: skip
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    ids, real = torch.randint(3, 50, (2, 26)), torch.ones(2, 26, dtype=torch.int64)
    real[1, 15:] = 0
    text["max_position_embeddings"] = 26
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    found, _ = counted(model, input_ids=ids, attention_mask=real, pixel_values=torch.randn(2, 3, 10, 10))
    assert {module.partition("_model")[0]: n for module, n in by_module(found).items()} == {
        "text": 41,
        "vision": 52,
    }


@quiet
@pytest.mark.parametrize("name", ["Wav2Vec2", "Hubert"])
def test_a_mask_of_samples_of_sound_is_found_where_it_has_become_one_of_frames(name):
    config = getattr(transformers, f"{name}Config")(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_stride=(4, 4), conv_kernel=(8, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer",
    )  # fmt: skip
    model = getattr(transformers, f"{name}Model")(config)
    real = torch.ones(2, 400, dtype=torch.int64)
    real[1, 200:] = 0
    frames = model._get_feat_extract_output_lengths(real.sum(1))
    found, _ = counted(model, torch.randn(2, 400), attention_mask=real)
    assert [*found.values()] == [int(frames.sum())]


class Tower(nn.Module):
    """Two heads over all of its tokens, whatever its mask says; a mask, where it follows one."""

    def forward(self, x, seen=None):
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=seen)


class TwoTowers(nn.Module):
    """A text and an image; the text's tower may forget its mask, the image may be joined to the text."""

    def __init__(self, way):
        super().__init__()
        self.way, self.text, self.image = way, Tower(), Tower()

    def forward(self, tokens, attention_mask, pixels=None):
        seen = attention_mask.bool()[:, None, None]
        if pixels is None:
            return self.text(torch.cat([tokens[:, :1], tokens], 1))
        if self.way == "joined":
            seen = nn.functional.pad(seen, (0, pixels.shape[1]), value=True)
            return self.text(torch.cat([tokens, pixels], 1), seen)
        return self.text(tokens, None if self.way == "forgets" else seen), self.image(pixels)


@pytest.mark.parametrize(
    ("way", "images", "expected"),
    [
        ("apart", True, []),
        ("forgets", True, ["text"]),
        ("joined", True, ["text"]),
        ("class token", False, ["text"]),
    ],
)
def test_a_text_s_padding_is_not_remarked_on_an_image_s_attention(way, images, expected):
    """On the text's own, on one that holds both, and behind a class token, it is."""
    pixels = (torch.randn(2, LENGTH + 3, WIDTH),) * images
    model = TwoTowers(way)
    with semdiag.capture(model, k=1) as calls:
        model(stream(), REAL, *pixels)
    remarks = calls.audit[calls.audit["reason"].str.contains("attention_mask marks padding")]
    assert remarks["module"].tolist() == expected
