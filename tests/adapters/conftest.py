"""Tiny random models of every transformers family that has routers: 2 or 3 layers, 8 experts, top-2."""

from __future__ import annotations

import importlib
import os
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZES = {
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], 128),
    **dict.fromkeys(["hidden_size", "d_model", "max_position_embeddings", "max_seq_len", "sliding_window"], 64),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layers"], 3),
    **dict.fromkeys(["encoder_layers", "decoder_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "num_heads", "n_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"], 2),
    **dict.fromkeys(["head_dim", "kv_channels", "d_kv", "q_lora_rank", "kv_lora_rank", "v_head_dim"], 16),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "router_hidden_size", "index_head_dim"], 16),
    **dict.fromkeys(["d_ff", "intermediate_size", "moe_intermediate_size", "encoder_ffn_dim"], 32),
    **dict.fromkeys(["decoder_ffn_dim", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 32),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 8),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "bos_token_id"], 1),
    **dict.fromkeys(["num_dense_layers", "decoder_sparse_step", "expert_interval"], 1),
    **dict.fromkeys(["pad_token_id", "decoder_start_token_id"], 0),
    **dict.fromkeys(["linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"], 16),
    **dict.fromkeys(["linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"], 4),
    "eos_token_id": 2,
}
LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
GROUPS = {"n_group": 4, "topk_group": 2}
MLA = {"num_key_value_heads": 4}  # latent attention has one key head for every head
MLA_GROUPS = MLA | GROUPS


@dataclass(frozen=True)
class Family:
    """How to build one family, and what must be found in it."""

    name: str
    model: str
    """The model's class in `modeling_<name>`."""
    keys: str = "decoder.0 decoder.1 decoder.2"
    config: dict[str, Any] = field(default_factory=dict)
    num_experts: int = 8
    top_k: int = 2
    inputs: dict[str, Any] = field(default_factory=dict)
    """What the forward takes beside input_ids."""
    odd: bool = False
    """True where the experts are not called with the ids as they are chosen: these have tests of their own."""

    def __str__(self) -> str:
        return self.name

    def build(self) -> nn.Module:
        """Return the model, with random correction biases."""
        module = importlib.import_module(f"transformers.models.{self.name}.modeling_{self.name}")
        model_class = getattr(module, self.model)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tiny sizes and missing kernels
            model = model_class(tiny_config(model_class.config_class, self.config)).eval()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.rpartition(".")[2] in {"e_score_correction_bias", "expert_bias", "balancing_biases"}:
                tensor.data.normal_(std=0.3)
            elif "tid2eid" in name:
                tensor.copy_(torch.rand(len(tensor), self.num_experts).topk(self.top_k).indices)
            elif name.rpartition(".")[2] == "weight" and tensor.ndim == 2 and 0 < tensor.shape[0] <= 16:
                tensor.data.normal_()  # logits that differ, and routers that are initialised to zero
        return model

    def run(self, model: nn.Module) -> None:
        """Run one forward of two sequences of ten tokens, no two alike."""
        ids = torch.arange(3, 23).view(2, 10)
        more = {"decoder_input_ids": ids + 20} if model.config.is_encoder_decoder else {}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(input_ids=ids, **more, **self.inputs)


def tiny_config(config_class: type, overrides: dict[str, Any]) -> Any:
    """Return a config with every size that it knows made tiny; a dict makes the sub-config of that name."""
    known = {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    known |= {name for name, target in config_class.attribute_map.items() if target not in known}
    known -= {name for name, target in config_class.attribute_map.items() if target in known}
    values = {name: value for name, value in SIZES.items() if name in known}
    for name, value in overrides.items():
        sub_class = config_class.sub_configs.get(name)
        values[name] = tiny_config(sub_class, value) if sub_class else value
    return config_class(**values)


DENSE_FIRST = "decoder.1 decoder.2"
FAMILIES = [
    Family("afmoe", "AfmoeForCausalLM", DENSE_FIRST),
    Family("aria", "AriaTextForCausalLM"),
    Family("axk1", "AXK1ForCausalLM", DENSE_FIRST, MLA_GROUPS),
    Family("axk2", "AXK2ForCausalLM", DENSE_FIRST, MLA_GROUPS),
    Family("bailing_hybrid", "BailingHybridForCausalLM", DENSE_FIRST, LINEAR_FIRST | MLA_GROUPS),
    Family("beam", "BeamForCausalLM", "decoder.2", GROUPS | {"mlp_layer_types": ["dense", "dense", "sparse"]}),
    Family("cohere2_moe", "Cohere2MoeForCausalLM"),
    Family(
        "dbrx",
        "DbrxForCausalLM",
        config={
            "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
        },
    ),
    Family("deepseek_ocr2", "DeepseekOcr2TextModel", DENSE_FIRST, {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", DENSE_FIRST, MLA_GROUPS | {"topk_method": "group_limited_greedy"}),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", DENSE_FIRST, MLA_GROUPS),
    Family("deepseek_v32", "DeepseekV32ForCausalLM", DENSE_FIRST, MLA_GROUPS),
    Family("deepseek_v4", "DeepseekV4ForCausalLM", config={"mlp_layer_types": ["hash_moe", "moe", "moe"]}),
    Family("diffusion_gemma", "DiffusionGemmaEncoderTextModel"),
    Family("doge", "DogeForCausalLM", config={"is_moe": True, "num_experts": 9}, num_experts=9, odd=True),
    Family("dots1", "Dots1ForCausalLM", DENSE_FIRST, GROUPS),
    Family("dots3_note", "Dots3NoteForCausalLM", DENSE_FIRST, MLA_GROUPS),
    Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", DENSE_FIRST),
    Family(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeTextModel",
        "decoder.1 decoder.2 vision_moe.1 vision_moe.2",
        {
            "moe_intermediate_size": [32, 32],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        },
        inputs={"moe_mm_token_type_ids": torch.arange(20).view(2, 10) % 3},
    ),
    Family("exaone_moe", "ExaoneMoeForCausalLM", DENSE_FIRST, GROUPS),
    Family("flex_olmo", "FlexOlmoForCausalLM"),
    Family("flint", "FlintForCausalLM", "decoder.2"),
    Family("gemma4", "Gemma4ForCausalLM", config={"enable_moe_block": True, "hidden_size_per_layer_input": 0}),
    Family("glm4_moe", "Glm4MoeForCausalLM", DENSE_FIRST, GROUPS),
    Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", DENSE_FIRST, MLA_GROUPS),
    Family(
        "glm4v_moe",
        "Glm4vMoeTextModel",
        DENSE_FIRST,
        GROUPS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    ),
    Family(
        "glm5_next",
        "Glm5NextTextModel",
        DENSE_FIRST,
        MLA_GROUPS | LINEAR_FIRST | {"qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    Family("glm_moe_dsa", "GlmMoeDsaForCausalLM", DENSE_FIRST, MLA_GROUPS),
    Family("gpt_oss", "GptOssForCausalLM"),
    Family("granitemoe", "GraniteMoeForCausalLM"),
    Family("granitemoe_swa", "GraniteMoeSWAForCausalLM"),
    Family(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", config={"layer_types": ["mamba", "attention", "attention"]}
    ),
    Family("granitemoeshared", "GraniteMoeSharedForCausalLM"),
    Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
    Family("hy_v3", "HYV3ForCausalLM", DENSE_FIRST),
    Family("hy_v4", "HYV4ForCausalLM", DENSE_FIRST, GROUPS),
    Family(
        "hy_v4_vl",
        "HYV4VLTextModel",
        DENSE_FIRST,
        GROUPS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
    ),
    Family("inkling", "InklingForCausalLM"),
    Family("inkling2", "Inkling2ForCausalLM"),
    Family("inkling2_loop", "Inkling2LoopForCausalLM"),
    Family("jamba", "JambaForCausalLM", "decoder.1", {"attn_layer_period": 3, "attn_layer_offset": 1}),
    Family(
        "jetmoe",
        "JetMoeForCausalLM",
        "decoder.0 decoder.1 decoder.2 self_attention.0 self_attention.1 self_attention.2",
        odd=True,
    ),
    Family("kimi_linear", "KimiLinearForCausalLM", DENSE_FIRST, LINEAR_FIRST | MLA_GROUPS),
    Family("kolibri1", "Kolibri1ForCausalLM"),
    Family("laguna", "LagunaForCausalLM", DENSE_FIRST),
    Family("lara_mini", "LaraMiniForCausalLM"),
    Family(
        "lfm2_moe", "Lfm2MoeForCausalLM", DENSE_FIRST, {"layer_types": ["conv", "full_attention", "full_attention"]}
    ),
    Family("llama4", "Llama4ForCausalLM", odd=True),
    Family(
        "longcat_flash",
        "LongcatFlashForCausalLM",
        config={"zero_expert_num": 4, "ffn_hidden_size": 32, **MLA},
        num_experts=12,
    ),
    Family("mellum", "MellumForCausalLM"),
    Family("mimo_v2_flash", "MiMoV2FlashForCausalLM", DENSE_FIRST, GROUPS),
    Family("minimax", "MiniMaxForCausalLM"),
    Family("minimax_m2", "MiniMaxM2ForCausalLM"),
    Family("minimax_m3_vl", "MiniMaxM3VLForCausalLM"),
    Family("mistral4", "Mistral4ForCausalLM", DENSE_FIRST, MLA_GROUPS),
    Family("mistral_large4", "MistralLarge4TextModel", DENSE_FIRST, MLA_GROUPS),
    Family("mixtral", "MixtralForCausalLM"),
    Family("muse_spark", "MuseSparkTextModel"),
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        "decoder.1 decoder.3",
        GROUPS | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    ),
    Family(
        "nllb_moe",
        "NllbMoeModel",
        "encoder.1 decoder.1",
        {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
        odd=True,
    ),
    Family("olmoe", "OlmoeForCausalLM"),
    Family("openai_privacy_filter", "OpenAIPrivacyFilterModel"),
    Family("phimoe", "PhimoeForCausalLM"),
    Family("qwen2_moe", "Qwen2MoeForCausalLM"),
    Family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", config=LINEAR_FIRST),
    Family("qwen3_moe", "Qwen3MoeForCausalLM"),
    Family("qwen3_next", "Qwen3NextForCausalLM", config=LINEAR_FIRST),
    Family("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel"),
    Family("qwen3_vl_moe", "Qwen3VLMoeTextModel"),
    Family(
        "qwen4_exp",
        "Qwen4ExpForCausalLM",
        config=LINEAR_FIRST
        | {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
    ),
    Family("solar_open", "SolarOpenForCausalLM", config=GROUPS),
    Family("step3p7", "Step3p7TextModel", DENSE_FIRST, {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    Family(
        "switch_transformers",
        "SwitchTransformersModel",
        "encoder.1 decoder.1",
        {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 3},
        top_k=1,
        odd=True,
    ),
    Family("unlimited_ocr", "UnlimitedOcrTextModel", DENSE_FIRST, GROUPS),
    Family("zaya", "ZayaForCausalLM", config={"num_experts_per_tok": 1}, num_experts=9, top_k=1, odd=True),
]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run tiny models on one thread: handing their work to others costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[family for family in FAMILIES if not family.odd], ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    """One family at a time, of those whose experts are called with the chosen ids."""
    chosen: Family = request.param
    return chosen


@pytest.fixture
def family_named() -> dict[str, Family]:
    """All families by name."""
    return {family.name: family for family in FAMILIES}
