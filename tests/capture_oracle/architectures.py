# ruff: noqa: E501  # tables of numbers
"""Many architectures at toy size, each with inputs: what the capture is held against the truth on."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

B, L = 2, 8
SMALL = {
    "vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "emb_dim": 32, "embedding_size": 32, "embed_dim": 32,
    "n_embed": 32, "hidden_sizes": [32], "word_embed_proj_dim": 32, "entity_emb_size": 32, "d_embed": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "d_head": 8,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "n_ctx": 64, "n_positions": 64, "max_position_embeddings": 64,
    "intermediate_size": 48, "d_ff": 48, "ffn_dim": 48, "n_inner": 48, "d_inner": 48, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "ffn_hidden_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_local_experts": 2, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "first_k_dense": 1, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16, "sliding_window": 4,
    "attention_window": 4, "block_size": 4, "num_random_blocks": 1, "local_radius": 3, "global_block_size": 4,
    "max_source_positions": 32, "max_target_positions": 32, "num_mel_bins": 8, "image_size": 16, "patch_size": 4,
    "initializer_range": 0.4, "initializer_factor": 0.5, "init_std": 0.4, "rotary_dim": 4, "type_vocab_size": 2,
    "mamba_d_state": 4, "state_size": 4, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_n_groups": 1, "mamba_chunk_size": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_landmarks": 4, "segment_means_seq_len": L,
    "num_hash_functions": 2, "hash_code_len": 3, "projection_dim": 16, "lsh_attn_chunk_length": 4,
    "local_attn_chunk_length": 4, "num_buckets": 4, "attn_layers": ["local", "lsh"], "axial_pos_embds": False,
    "hidden_dropout_prob": 0.1, "num_channels": 3, "use_cache": False,
}  # fmt: skip
SPEECH = {
    "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip
INDEXED = {
    "num_key_value_heads": 4,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 4,
}  # learned choices of keys


@dataclass(frozen=True)
class Architecture:
    """A model and how it is called.

    Attributes:
        build: makes it.
        run: runs it, and returns a tensor.
        needs: the package it is from.
    """

    build: Callable[[], nn.Module]
    run: Callable[[nn.Module], torch.Tensor]
    needs: str = "transformers"


def ids(seed=0, length=L):
    return torch.randint(3, 50, (B, length), generator=torch.Generator().manual_seed(seed))


def real(side="right", length=L):
    mask = torch.ones(B, length, dtype=torch.int64)
    mask[1, length - 3 :] = 0
    return mask if side == "right" else mask.flip(1)


def first(output: Any) -> torch.Tensor:
    """The first tensor of what a model returns."""
    if isinstance(output, torch.Tensor):
        return output
    for value in output.values() if hasattr(output, "values") else output:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
        if isinstance(value, tuple | list):
            return first(value)
    raise AssertionError("no tensor")


def hugging_face(name, inputs, implementation=None, kind="Model", **options):
    """A model of transformers with its dimensions made small."""

    def build():
        import transformers

        config_class = getattr(transformers, f"{name}Config")
        known = {
            *inspect.signature(config_class.__init__).parameters, *vars(config_class()),
            *getattr(config_class, "attribute_map", {}),
        }  # fmt: skip
        if "depths" in options:  # lists, a number for each stage
            known -= {"num_attention_heads", "num_hidden_layers", "hidden_size"}
        config = config_class(**{k: v for k, v in SMALL.items() if k in known} | options)
        more = {} if implementation is None else {"attn_implementation": implementation}
        return getattr(transformers, f"{name}{kind}")._from_config(config, **more)

    return Architecture(build, lambda model: first(model(**inputs())))


def text():
    return {"input_ids": ids(), "attention_mask": real()}


def bare():
    return {"input_ids": ids()}


def left():
    return {"input_ids": ids(), "attention_mask": real("left")}


def pair():
    return {
        "input_ids": ids(), "attention_mask": real(), "decoder_input_ids": ids(1, 5),
        "decoder_attention_mask": real("right", 5),
    }  # fmt: skip


def image(size=16):
    return lambda: {"pixel_values": torch.randn(B, 3, size, size, generator=torch.Generator().manual_seed(0))}


def speech():
    wave = torch.randn(B, 400, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(B, 400, dtype=torch.int64)
    mask[1, 250:] = 0
    return {"input_values": wave, "attention_mask": mask}


SDPA_AND_EAGER = {
    left: "GPT2 GPTNeoX OPT Llama Mistral Qwen2 Qwen3 Phi",
    text: "Bert Roberta DistilBert Albert Electra XLMRoberta ModernBert",
    pair: "Bart T5 Marian MBart Pegasus M2M100 MT5 UMT5",
}
ONE = {
    left: """
        GPTJ Gemma2 Bloom Falcon Mpt CodeGen GPTNeo GPTBigCode Cohere Mixtral Olmoe Granite DeepseekV3 DeepseekV2 GptOss
        Phi3 StableLm Starcoder2 Persimmon Nemotron Glm DiffLlama Jamba Mamba Mamba2 Qwen3Next Bamba RecurrentGemma
        Zamba2 XGLM CTRL Helium Qwen2Moe JetMoe BitNet Rwkv FalconMamba Exaone4 SmolLM3 Llama4Text
    """,
    text: """
        MPNet Deberta DebertaV2 Longformer BigBird XLNet XLM Flaubert Funnel RoFormer ConvBert SqueezeBert
        MobileBert IBert Esm Ernie Luke MegatronBert Reformer FNet Yoso RemBert Canine LayoutLM Mra Data2VecText
        Camembert Splinter OpenAIGPT
    """,
    bare: "Nystromformer",
    pair: """
        SwitchTransformers LED LongT5 BigBirdPegasus ProphetNet Blenderbot PegasusX NllbMoe FSMT PLBart Mvp
    """,
    image(): "ViT DeiT Beit Dinov2 ViTMAE ViTMSN Data2VecVision",
    image(32): "CLIPVision SiglipVision Swin Swinv2 Segformer Pvt",
    speech: "Wav2Vec2 Hubert WavLM UniSpeech SEW Data2VecAudio",
}
SPECIAL = {  # what the general numbers do not fit
    "Longformer": {"attention_window": [4, 4]},
    "LED": {"attention_window": [4, 4]},
    "BigBird": {"attention_type": "original_full"},
    "LongT5": {"encoder_attention_type": "local"},
    "Swin": {"patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32},
    "Swinv2": {"patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32},
    "Segformer": {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [2, 4],
                  "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]},
    "Pvt": {"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32],
            "num_attention_heads": [2, 4], "sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2], "strides": [4, 2],
            "mlp_ratios": [2, 2]},
    "DeepseekV3": {"num_key_value_heads": 4}, "DeepseekV2": {"num_key_value_heads": 4},
    "DeepseekV32": INDEXED, "GlmMoeDsa": INDEXED, "HYV4": INDEXED, "AXK2": INDEXED, "MistralLarge4Text": INDEXED, "Dots3NoteText": INDEXED,
    "Gemma3nText": {"vocab_size_per_layer_input": 60, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "num_kv_shared_layers": 0,
                    "layer_types": ["full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 2},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "CLIPVision": {"image_size": 32, "patch_size": 8},
    "SiglipVision": {"image_size": 32, "patch_size": 8},
    "Wav2Vec2": SPEECH, "Hubert": SPEECH, "WavLM": SPEECH, "UniSpeech": SPEECH, "Data2VecAudio": SPEECH, "SEW": SPEECH,
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "Bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": "auto"},
    "Qwen3Next": {"layer_types": ["linear_attention", "full_attention"]},
    "RecurrentGemma": {"lru_width": 32, "attention_window_size": 4, "num_key_value_heads": 1,
                       "block_types": ["recurrent", "attention"]},
    "Zamba2": {"layers_block_type": ["mamba", "hybrid"], "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1,
               "attention_hidden_size": 64, "attention_head_dim": 16},
    "Mpt": {"max_seq_len": 64, "expansion_ratio": 2},
    "Falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "Albert": {"embedding_size": 16},
    "Canine": {"local_transformer_stride": 4, "downsampling_rate": 4, "num_hash_buckets": 16},
    "FSMT": {"langs": ["en", "de"], "src_vocab_size": 60, "tgt_vocab_size": 60},
    "Funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "Reformer": {"axial_pos_embds": False, "lsh_num_chunks_before": 1, "is_decoder": False, "attention_head_size": 8},
    "Splinter": {}, "MobileBert": {"initializer_range": 0.05, "intra_bottleneck_size": 32, "true_hidden_size": 32, "num_feedforward_networks": 1},
    "Opt": {}, "OpenAIGPT": {}, "PegasusX": {"block_size": 4, "num_global_tokens": 2},
    "Luke": {"entity_vocab_size": 10}, "Yoso": {"use_expectation": True}, "BitNet": {},
    "Llama4Text": {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
}  # fmt: skip


def architectures():
    """All of them, by name."""
    found = {}
    for inputs, names in SDPA_AND_EAGER.items():
        for name in names.split():
            for kind in ("sdpa", "eager"):
                found[f"{name}, {kind}"] = hugging_face(name, inputs, kind, **SPECIAL.get(name, {}))
    for inputs, names in ONE.items():
        for name in names.split():
            found[name] = hugging_face(name, inputs, **SPECIAL.get(name, {}))
    return found


def ready(architecture):
    """The model, in evaluation mode, the same each time."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return architecture.build().eval()
