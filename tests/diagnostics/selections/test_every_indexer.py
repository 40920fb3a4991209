"""Every indexer of transformers 5.24, as a tiny random model: what it chooses is judged, by its own causality."""

from importlib import import_module

import pytest
import torch

from semdiag import InputError
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.rounding import FORMATS
from semdiag.selections.dense import kept_of_dense
from semdiag.selections.files import read_selections
from semdiag.selections.own import Saving, own_selections
from semdiag.selections.reused import ReusedChoices

pytestmark = pytest.mark.slow

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_shared_experts": 1, "n_routed_experts": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
SMALL = {"index_topk": 6, "index_n_heads": 2, "index_head_dim": 16}
SPARSE = {**LATENT, **SMALL}
HALVES, PAIRS, AT_END, PAIRS_AT_END = [0, 0], [1, 0], [0, 1], [1, 1]  # forms of the rotation
# Family: its configuration, the layers that choose, what, and the form that gives their scores, if known.
FAMILIES = {
    "deepseek_v32.DeepseekV32": ({**SPARSE, "first_k_dense_replace": 1}, [0, 1], ("keys", 28, 6), HALVES),
    "glm_moe_dsa.GlmMoeDsa": (
        {**SPARSE, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
        [0, 2], ("keys", 28, 6), PAIRS,
    ),
    "axk2.AXK2": ({**SPARSE, "first_k_dense_replace": 1}, [0, 1], ("keys", 28, 6), HALVES),
    "hy_v4.HYV4": (SPARSE, [0, 1], ("keys", 28, 6), AT_END),
    "hy_v4_vl.HYV4VLText": (
        {**SPARSE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        [0, 1], ("keys", 28, 6), PAIRS_AT_END,
    ),
    "dots3_note.Dots3NoteText": (
        {**SPARSE, "layer_types": ["full_attention"] * 2}, [0, 1], ("keys", 28, 6), PAIRS,
    ),
    "mistral_large4.MistralLarge4Text": (
        {**SPARSE, "first_k_dense_replace": 1, "head_dim": 8}, [0, 1], ("keys", 28, 6), PAIRS,
    ),
    "deepseek_v4.DeepseekV4": (
        {**SMALL, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "n_routed_experts": 8,
         "o_groups": 2, "o_lora_rank": 8, "sliding_window": 8, "index_topk": 2, "hc_mult": 2,
         "layer_types": ["compressed_sparse_attention"] * 2},
        [0, 1], ("blocks", 7, 2), None,
    ),
    "minimax_m3_vl.MiniMaxM3VLText": (
        {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "rotary_dim": 8, "index_n_heads": 2,
         "dense_intermediate_size": 32, "shared_intermediate_size": 16, "index_head_dim": 16,
         "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1,
         "layer_types": ["minimax_m3_sparse"] * 2},
        [0, 1], ("blocks", 7, 3), None,
    ),
    "glm5_next.Glm5NextText": (
        {**SPARSE, "qk_rope_head_dim": 0, "index_topk": 8, "index_kpool": 4, "linear_head_dim": 8,
         "linear_num_heads": 4, "hc_mult": 2, "hc_sinkhorn_iters": 2,
         "layer_types": ["indexed_attention", "linear_attention"]},
        [0], ("blocks", 7, 2), None,
    ),
    "qwen4_exp.Qwen4ExpText": (
        {"num_key_value_heads": 2, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 16,
         "num_experts": 4, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [], "indexer_n_heads": 2,
         "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
         "layer_types": ["indexed_attention", "linear_attention"]},
        [0], ("blocks", 7, 2), None,
    ),
}  # fmt: skip


def built(name, **changed):
    """A model with random weights."""
    folder, family = name.split(".")
    pytest.importorskip(f"transformers.models.{folder}", reason="this transformers has no such model")
    configuration = import_module(f"transformers.models.{folder}.configuration_{folder}")
    modeling = import_module(f"transformers.models.{folder}.modeling_{folder}")
    torch.manual_seed(3)
    settings = FAMILIES[name][0]
    model = getattr(modeling, f"{family}Model")(
        getattr(configuration, f"{family}Config")(**{**COMMON, **settings, **changed})
    )
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, tensor in model.named_parameters():
            if tensor.ndim > 1:
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * tensor.shape[-1] ** -0.5)
    return model.eval()


@pytest.fixture
def texts():
    """Four texts of 28 tokens; five of the first are padding on the left."""
    ids = torch.randint(3, 64, (4, 28), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def chosen_by(model, texts, path):
    saving = Saving(path / "own.npz")
    loaded = LoadedModel("tiny", "", model, "hugging face", "unknown")
    device = torch.device("cpu")
    found = own_selections(loaded, [texts], FORMATS["bfloat16"], device, torch.float32, saving)
    saving.write()
    return [one for one in found.selections if "indexer" in one.module], found, read_selections(path / "own.npz")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_what_an_indexer_chooses_is_judged_by_its_own_causality(name, texts, tmp_path):
    _, layers, size, form = FAMILIES[name]
    indexers, found, saved = chosen_by(built(name), texts, tmp_path)
    assert [one.layer for one in indexers] == layers
    assert not any("indexer" in module for module, _ in found.others)
    by_module = {each.module: each for each in saved}
    for one in indexers:
        (part,) = one.parts
        assert (part.kind, part.choices, part.k) == size
        assert part.causal
        assert set(part.counts) <= {"exact", "legal_tie"}, "no fault in a right indexer"
        assert sum(part.counts.values()) >= int(texts["attention_mask"].sum())
        stages = by_module[one.module].stages
        assert (stages["index_form"].tolist() if stages else None) == form
        assert 0 < int((part.margin < torch.inf).sum()) < len(part.margin), "some rows have no more than k"
    chosen = {module: one.indices for module, one in by_module.items() if "indexer" in module}
    assert found.donors == {layer: donor for layer, donor in DONORS.items() if name.startswith("glm_moe_dsa")}
    for layer, donor in found.donors.items():
        assert torch.equal(chosen[f"{layer}.indexer"], chosen[donor])
    assert len(chosen) == len(layers) + len(found.donors)


DONORS = {"layers.1.self_attn": "layers.0.self_attn.indexer"}  # the layer of GLM-MoE-DSA that has no indexer


class Indexer(torch.nn.Module):
    """An indexer that chooses two of the tokens."""

    def forward(self, x):
        return (x @ x.mT).topk(2, -1)[1]


class Layer(torch.nn.Module):
    def __init__(self, indexer):
        super().__init__()
        self.indexer = indexer

    def forward(self, x, prev_topk_indices=None):
        return prev_topk_indices if self.indexer is None else self.indexer(x)


def test_a_layer_that_gets_another_choice_than_before_has_no_donor():
    first, second, user = Layer(Indexer()), Layer(Indexer()), Layer(None)
    model = torch.nn.ModuleList([first, second, user])
    x = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(0))
    reused = ReusedChoices()
    with reused.watch(model):
        choice = first(x)
        second(-2 * x[:, :, :2])
        user(x, prev_topk_indices=choice.clone())
    assert reused.donors == {"2": "0.indexer"}
    with reused.watch(model):
        user(x, prev_topk_indices=choice)  # of the pass before
    assert reused.donors == {"2": ""}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


AHEAD = {  # how an indexer of blocks is made to see one block more
    "deepseek_v4.DeepseekV4": ("position_ids", 2, 4),
    "minimax_m3_vl.MiniMaxM3VLText": ("position_ids", 3, 4),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", AHEAD)
def test_a_block_after_the_query_is_one_of_the_future(name, texts, tmp_path):
    keyword, place, size = AHEAD[name]
    model = built(name)
    for module_name, module in model.named_modules():
        if module_name.endswith("indexer"):
            forward = module.forward

            def ahead(*arguments, forward=forward, **keywords):
                arguments = list(arguments)
                if keyword in keywords:
                    keywords[keyword] = (keywords[keyword] + size).clamp(max=27)
                else:
                    arguments[place] = (arguments[place] + size).clamp(max=27)
                return forward(*arguments, **keywords)

            module.forward = ahead
    indexers, _, _ = chosen_by(model, texts, tmp_path)
    assert all(one.parts[0].counts["future"] > 10 for one in indexers)
    assert all((one.faulty["class"] == "future").all() for one in indexers)


KEEPING = ("deepseek_v32.DeepseekV32", "glm_moe_dsa.GlmMoeDsa", "hy_v4.HYV4", "mistral_large4.MistralLarge4Text")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KEEPING)
def test_what_an_indexer_keeps_of_dense_attention_is_that_of_loops(name, texts):
    """Beside the model's own weights, run with an index_topk of all keys, and its indexer's own scores."""
    model = built(name, index_n_heads=16)  # with few heads, many scores tie at 0
    found = kept_of_dense(model, [texts, {key: value[1:] for key, value in texts.items()}])
    assert not found.left_out
    assert all(module.index_topk == 6 for module in model.modules() if hasattr(module, "index_topk"))
    scores = {}
    for module_name, module in model.named_modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 28

            def score(module, arguments, output, name=module_name):
                scores[name] = output

            module.register_forward_hook(score)
    model.set_attn_implementation("eager")
    weights = model(**texts, output_attentions=True).attentions
    donor = None
    for layer, table in enumerate(weights):
        name = f"layers.{layer}.self_attn"
        donor = f"{name}.indexer" if f"{name}.indexer" in scores else donor
        of_layer = found.heads[found.heads["module"] == name].set_index("head")
        assert set(of_layer["indexer"]) == {donor}
        for head in range(4):
            kept, oracle, window, top1, recall = [], [], [], [], []
            for sample in (0, 1, 2, 3, 1, 2, 3):
                first = 5 if sample == 0 else 0
                for query in range(first + 6, 28):
                    row = table[sample, head, query].double().tolist()
                    ranked = [key for key in scores[donor][sample, query].tolist() if first <= key <= query]
                    choice, best = set(ranked[:6]), sorted(range(28), key=lambda key: -row[key])[:6]
                    kept.append(sum(row[key] for key in choice))
                    oracle.append(sum(row[key] for key in best))
                    window.append(sum(row[query - 5 : query + 1]))
                    top1.append(best[0] in choice)
                    recall.append(len(choice & set(best)) / 6)
            row = of_layer.loc[head]
            assert row["rows"] == len(kept) == 17 + 6 * 22
            for column, values in (("kept", kept), ("oracle", oracle), ("window", window)):
                assert row[column] == pytest.approx(sum(values) / len(values), abs=2e-6)
            assert row["kept_p5"] == pytest.approx(sorted(kept)[round(0.05 * (len(kept) - 1))], abs=0.02)
            assert row["top1"] == pytest.approx(sum(top1) / len(top1), abs=0.02)
            assert row["recall"] == pytest.approx(sum(recall) / len(recall), abs=0.01)
            assert row["kept"] <= row["oracle"] + 1e-12
    own = found.donors[found.donors["donor"] == donor]
    assert (own[own["module"] == f"layers.{len(weights) - 1}.self_attn"]["overlap"] == 1).all()


def test_a_model_without_an_indexer_is_refused(texts):
    with pytest.raises(InputError, match="no indexer that chooses keys"):
        kept_of_dense(torch.nn.Linear(2, 2), [])
