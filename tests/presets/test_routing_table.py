"""The kind of each parameter of many architectures, reviewed by hand: what an expert would leave to Adam, stack or split.

Models are built from tiny configs. A row of the table is a kind, with the options that depend on the parameter, and names of
parameters: ``*`` is anything, ``{a,b}`` is ``a`` or ``b``. The first row that has a parameter says its kind. A ``matrix`` has no
kind, and is preconditioned whole.
"""

import fnmatch
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune

import lather
from lather.kinds import KINDS

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries
transformers = pytest.importorskip("transformers")

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
TEXT = TOKENS | {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
GROUPED = TEXT | {"num_key_value_heads": 2}
SHORT = TEXT | {"max_position_embeddings": 32}
GPT = {"vocab_size": 96, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 1}
SIDES = ("encoder", "decoder")
PAIR = {"vocab_size": 96, "d_model": 16, "max_position_embeddings": 32, "decoder_start_token_id": 1, **TOKENS}
PAIR |= {f"{side}_{name}": size for side in SIDES for name, size in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 40))}
T5 = {"vocab_size": 96, "d_model": 16, "num_layers": 1, "num_heads": 4, "d_ff": 40, "d_kv": 4}
IMAGE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
IMAGE |= {"image_size": 16, "patch_size": 4, "num_labels": 10}
SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 2,
    "num_labels": 10,
}
SPEECH = TEXT | {"conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
MOE = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_MOE = GROUPED | {"num_local_experts": 4, "head_dim": 4}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
DEEPSEEK = TEXT | MLA | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
DBRX = {
    "vocab_size": 96,
    "d_model": 16,
    "n_layers": 1,
    "n_heads": 4,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
}
DBRX |= {"ffn_config": {"hidden_size": 16, "ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2}}
JAMBA = GROUPED | {"num_hidden_layers": 2, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 2}
JAMBA |= {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0}
NEXT = MOE | {"head_dim": 4, "num_hidden_layers": 2, "shared_expert_intermediate_size": 24, "linear_num_value_heads": 2}
NEXT |= {"linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
NEXT |= {"layer_types": ["linear_attention", "full_attention"]}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "num_labels": 10}
DETR = PAIR | {"num_queries": 6, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
DETR |= {"backbone_config": {"model_type": "resnet", "out_features": ["stage2"], **RESNET}}
CONFORMER = IMAGE | {"num_mel_bins": 16, "subsampling_conv_channels": 8}
SPEECH_PAIR = {name: value for name, value in PAIR.items() if name != "d_model"} | {"hidden_size": 16, "conv_dim": [8, 8]}
SPEECH_PAIR |= {name: value for name, value in SPEECH.items() if name.startswith(("conv_", "num_conv", "num_feat"))}
ZAMBA = TEXT | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "attention_hidden_size": 32}
ZAMBA |= {"mamba_d_state": 4, "mamba_dt_rank": 2, "n_mamba_heads": 2, "attention_head_dim": 8, "num_key_value_heads": 4}
HYBRID = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "shared_intermediate_size": 24}
HYBRID |= {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}
ERNIE = GROUPED | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0}
SEGFORMER = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3]}
SEGFORMER |= {"strides": [2, 2], "num_attention_heads": [2, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 10}
SAM_SEES = {"hidden_size": 16, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
SAM_SEES |= {"patch_size": 8, "mlp_dim": 40, "window_size": 2, "num_pos_feats": 8}
SAM_MASKS = {"hidden_size": 16, "mlp_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
SAM = {"vision_config": SAM_SEES, "mask_decoder_config": SAM_MASKS}
SAM |= {"prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}}
BLIP_TEXT = SHORT | {"model_type": "opt", "ffn_dim": 40, "word_embed_proj_dim": 16}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt2-cross": ("GPT2LMHeadModel", GPT | {"add_cross_attention": True, "n_embd": 48}),  # 2 * 48 is 3 * 4 * 8
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT),
    "gpt_bigcode-mha": ("GPTBigCodeForCausalLM", GPT | {"multi_query": False}),
    "codegen": ("CodeGenForCausalLM", GPT | {"rotary_dim": 4, "n_ctx": 32}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 4}),
    "phi3": ("Phi3ForCausalLM", GROUPED),
    "gpt_neox": ("GPTNeoXForCausalLM", TEXT),
    "bloom": ("BloomForCausalLM", {"vocab_size": 96, "hidden_size": 16, "n_layer": 1, "n_head": 4}),
    "falcon": ("FalconForCausalLM", TEXT),
    "mpt": ("MptForCausalLM", {"vocab_size": 96, "d_model": 16, "n_layers": 1, "n_heads": 4}),
    "opt": ("OPTForCausalLM", SHORT | {"ffn_dim": 40, "word_embed_proj_dim": 8}),
    "mixtral": ("MixtralForCausalLM", LOCAL_MOE),
    "qwen2_moe": ("Qwen2MoeForCausalLM", MOE | {"shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", MOE | {"head_dim": 4}),
    "qwen3_next": ("Qwen3NextForCausalLM", NEXT),
    "olmoe": ("OlmoeForCausalLM", MOE),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK | {"num_key_value_heads": 4, "moe_intermediate_size": 24}),
    "gpt_oss": ("GptOssForCausalLM", LOCAL_MOE),
    "llama4": ("Llama4ForCausalLM", LOCAL_MOE | {"intermediate_size_mlp": 24, "interleave_moe_layer_step": 1}),
    "dbrx": ("DbrxForCausalLM", DBRX),
    "jamba": ("JambaForCausalLM", JAMBA),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_decoder_layers": 1},
    ),
    "mamba": ("MambaForCausalLM", TEXT | {"state_size": 4, "time_step_rank": 2}),
    "mamba2": ("Mamba2ForCausalLM", TEXT | {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1}),
    "bert": ("BertForMaskedLM", SHORT),
    "bert-untied": ("BertForMaskedLM", SHORT | {"tie_word_embeddings": False}),
    "bert-classes": ("BertForSequenceClassification", SHORT | {"num_labels": 2}),  # as many as token types
    "roberta": ("RobertaForMaskedLM", SHORT),
    "electra": ("ElectraForPreTraining", SHORT | {"embedding_size": 8}),
    "modernbert": ("ModernBertForMaskedLM", TEXT | {"cls_token_id": 0, "sep_token_id": 1}),
    "deberta_v2": (
        "DebertaV2ForMaskedLM",
        SHORT | {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "conv_kernel_size": 3},
    ),
    "xlnet": ("XLNetLMHeadModel", {"vocab_size": 96, "d_model": 16, "n_layer": 1, "n_head": 4, "d_inner": 40}),
    "t5": ("T5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", PAIR),
    "whisper": ("WhisperForConditionalGeneration", PAIR | {"max_source_positions": 16, "max_target_positions": 16}),
    "musicgen": ("MusicgenForCausalLM", TEXT | {"ffn_dim": 40, "num_codebooks": 2}),
    "wav2vec2": ("Wav2Vec2ForCTC", SPEECH),
    "conformer": ("Wav2Vec2ConformerForCTC", SPEECH | {"position_embeddings_type": "relative"}),
    "vit": ("ViTForImageClassification", IMAGE),
    "beit": ("BeitForImageClassification", IMAGE | {"use_relative_position_bias": True, "use_mask_token": True}),
    "dinov2": ("Dinov2WithRegistersForImageClassification", IMAGE),
    "swin": ("SwinForImageClassification", SWIN),
    "swinv2": ("Swinv2ForImageClassification", SWIN),
    "convnext": ("ConvNextForImageClassification", RESNET | {"num_stages": 2}),
    "resnet": ("ResNetForImageClassification", RESNET),
    "mobilenet": ("MobileNetV2ForImageClassification", {"num_labels": 10, "depth_multiplier": 0.1, "image_size": 32}),
    "detr": ("DetrForObjectDetection", DETR),
    "clip": ("CLIPModel", {"text_config": SHORT, "vision_config": IMAGE, "projection_dim": 8}),
    "siglip": ("SiglipModel", {"text_config": SHORT, "vision_config": IMAGE}),
    "llava": (
        "LlavaForConditionalGeneration",
        {"vision_config": IMAGE | {"model_type": "clip_vision_model"}, "text_config": GROUPED | {"model_type": "llama"}},
    ),
    "perceiver": (
        "PerceiverForMaskedLM",
        {
            **{"vocab_size": 96, "d_model": 16, "d_latents": 16, "num_latents": 6, "num_blocks": 1, "max_position_embeddings": 32},
            **{"num_self_attends_per_block": 1, "num_self_attention_heads": 2, "num_cross_attention_heads": 2},
        },
    ),
    "parakeet": ("ParakeetForCTC", {"vocab_size": 96, "pad_token_id": 2, "encoder_config": CONFORMER}),
    "timesformer": ("TimesformerForVideoClassification", IMAGE | {"num_frames": 4}),
    "speecht5": ("SpeechT5ForSpeechToText", SPEECH_PAIR),
    "zamba": ("ZambaForCausalLM", ZAMBA),
    "nllb_moe": ("NllbMoeForConditionalGeneration", PAIR | {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1}),
    "granite_hybrid": ("GraniteMoeHybridForCausalLM", HYBRID),
    "ernie_moe": ("Ernie4_5_MoeForCausalLM", ERNIE | {"moe_num_shared_experts": 1}),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", GROUPED | {"num_hidden_layers": 3, "lru_width": 16, "head_dim": 4}),
    "segformer": ("SegformerForSemanticSegmentation", SEGFORMER),
    "sam": ("SamModel", SAM),
    "blip2": (
        "Blip2ForConditionalGeneration",
        {"vision_config": IMAGE, "text_config": BLIP_TEXT, "num_query_tokens": 4}
        | {"qformer_config": SHORT | {"encoder_hidden_size": 16}},
    ),
}

TABLE = """
= gpt2
embedding | transformer.wte.weight
position | transformer.wpe.weight
fused split=3 split_dim=1 | *.c_attn.weight
matrix | *.attn.c_proj.weight *.mlp.{c_fc,c_proj}.weight
norm | *.ln_{1,2,f}.*
bias | *.bias

= gpt2-cross
embedding | transformer.wte.weight
position | transformer.wpe.weight
fused split=3 split_dim=1 | *.attn.c_attn.weight
matrix | *.crossattention.{c_attn,q_attn,c_proj}.weight *.attn.c_proj.weight *.mlp.{c_fc,c_proj}.weight
norm | *.ln_{1,2,f,cross_attn}.*
bias | *.bias

= gpt_bigcode
embedding | transformer.wte.weight
position | transformer.wpe.weight
fused split=16,4,4 | *.c_attn.weight
matrix | *.attn.c_proj.weight *.mlp.{c_fc,c_proj}.weight
norm | *.ln_{1,2,f}.*
bias | *.bias

= gpt_bigcode-mha
embedding | transformer.wte.weight
position | transformer.wpe.weight
matrix | *.attn.{c_attn,c_proj}.weight *.mlp.{c_fc,c_proj}.weight
norm | *.ln_{1,2,f}.*
bias | *.bias

= codegen
embedding | transformer.wte.weight
head | lm_head.weight
matrix | *.attn.{qkv,out}_proj.weight *.mlp.fc_{in,out}.weight
norm | *.ln_{1,f}.*
bias | *.bias

= llama mistral
embedding | model.embed_tokens.weight
head | lm_head.weight
matrix | *.self_attn.{q,k,v,o}_proj.weight *.mlp.{gate,up,down}_proj.weight
norm | *norm.weight

= qwen2
embedding | model.embed_tokens.weight
head | lm_head.weight
matrix | *.self_attn.{q,k,v,o}_proj.weight *.mlp.{gate,up,down}_proj.weight
norm | *norm.weight
bias | *.{q,k,v}_proj.bias

= gemma2
embedding | model.embed_tokens.weight
matrix | *.self_attn.{q,k,v,o}_proj.weight *.mlp.{gate,up,down}_proj.weight
norm | *norm.weight

= phi3
embedding | model.embed_tokens.weight
head | lm_head.weight
fused split=16,8,8 | *.qkv_proj.weight
fused split=2 | *.gate_up_proj.weight
matrix | *.o_proj.weight *.down_proj.weight
norm | *norm.weight

= gpt_neox
embedding | gpt_neox.embed_in.weight
head | lm_head.weight
matrix | *.attention.{query_key_value,dense}.weight *.mlp.dense_*.weight
norm | *norm.*
bias | *.bias

= bloom
embedding | transformer.word_embeddings.weight
matrix | *.self_attention.{query_key_value,dense}.weight *.mlp.dense_*.weight
norm | *norm.* *.ln_f.*
bias | *.bias

= falcon
embedding | transformer.word_embeddings.weight
matrix | *.self_attention.{query_key_value,dense}.weight *.mlp.dense_*.weight
norm | *norm.* *.ln_f.*

= mpt
embedding | transformer.wte.weight
fused split=3 | *.Wqkv.weight
matrix | *.attn.out_proj.weight *.ffn.{up,down}_proj.weight
norm | *norm_?.weight

= opt
embedding | *.embed_tokens.weight
position | *.embed_positions.weight
matrix | *.project_{in,out}.weight *.self_attn.{q,k,v,out}_proj.weight *.fc{1,2}.weight
norm | *norm.*
bias | *.bias

= mixtral
embedding | model.embed_tokens.weight
head | lm_head.weight
router | *.mlp.gate.weight
fused batch_dims=1 split=2 split_dim=1 | *.experts.gate_up_proj
experts batch_dims=1 | *.experts.down_proj
matrix | *.self_attn.{q,k,v,o}_proj.weight
norm | *norm.weight

= qwen2_moe
embedding | model.embed_tokens.weight
head | lm_head.weight
router | *.mlp.gate.weight
fused batch_dims=1 split=2 split_dim=1 | *.experts.gate_up_proj
experts batch_dims=1 | *.experts.down_proj
matrix | *.self_attn.{q,k,v,o}_proj.weight *.shared_expert.{gate,up,down}_proj.weight *.shared_expert_gate.weight
norm | *norm.weight
bias | *.{q,k,v}_proj.bias

= qwen3_moe olmoe
embedding | model.embed_tokens.weight
head | lm_head.weight
router | *.mlp.gate.weight
fused batch_dims=1 split=2 split_dim=1 | *.experts.gate_up_proj
experts batch_dims=1 | *.experts.down_proj
matrix | *.self_attn.{q,k,v,o}_proj.weight
norm | *norm.weight

= qwen3_next
embedding | model.embed_tokens.weight
head | lm_head.weight
router | *.mlp.gate.weight
depthwise | *.linear_attn.conv1d.weight
fused batch_dims=1 split=2 split_dim=1 | *.experts.gate_up_proj
experts batch_dims=1 | *.experts.down_proj
bias | *.linear_attn.{A_log,dt_bias,norm.weight}
matrix | *.linear_attn.{in_proj_qkvz,in_proj_ba,out_proj}.weight *.self_attn.{q,k,v,o}_proj.weight
matrix | *.shared_expert.{gate,up,down}_proj.weight *.shared_expert_gate.weight
norm | *norm.weight

= deepseek_v3
embedding | model.embed_tokens.weight
head | lm_head.weight
router | *.mlp.gate.weight
fused batch_dims=1 split=2 split_dim=1 | *.experts.gate_up_proj
experts batch_dims=1 | *.experts.down_proj
matrix | *.self_attn.{q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj}.weight *.shared_experts.{gate,up,down}_proj.weight
norm | *norm.weight

= gpt_oss
embedding | model.embed_tokens.weight
head | lm_head.weight
router | *.mlp.router.weight
experts batch_dims=1 | *.experts.{gate_up_proj,down_proj}
bias preconditioner=None | *.experts.*_bias
matrix | *.self_attn.{q,k,v,o}_proj.weight
norm | *norm.weight
bias | *.bias *.sinks

= llama4
embedding | model.embed_tokens.weight
head | lm_head.weight
router | *.router.weight
experts batch_dims=1 | *.experts.{gate_up_proj,down_proj}
matrix | *.self_attn.{q,k,v,o}_proj.weight *.shared_expert.{gate,up,down}_proj.weight
norm | *norm.weight

= dbrx
embedding | transformer.wte.weight
head | lm_head.weight
router | *.router.layer.weight
fused split=16,8,8 | *.Wqkv.weight
experts batch_dims=0 split=4 | *.experts.mlp.{w1,v1,w2}
matrix | *.out_proj.weight
norm | *.norm_{1,2,f}.weight

= jamba
embedding | model.embed_tokens.weight
head | lm_head.weight
router | *.router.weight
depthwise | *.mamba.conv1d.weight
fused batch_dims=1 split=2 split_dim=1 | *.experts.gate_up_proj
experts batch_dims=1 | *.experts.down_proj
bias preconditioner=None | *.mamba.A_log
matrix | *.mamba.{in,x,dt,out}_proj.weight *.self_attn.{q,k,v,o}_proj.weight
norm | *norm.weight
bias | *.bias *.mamba.D

= switch
embedding | shared.weight
position | *.relative_attention_bias.weight
router | *.router.classifier.weight
matrix | *.SelfAttention.{q,k,v,o}.weight *.EncDecAttention.{q,k,v,o}.weight *.experts.expert_{0,1,2,3}.{wi,wo}.weight
norm | *norm.weight

= mamba
embedding | backbone.embeddings.weight
depthwise | *.conv1d.weight
bias preconditioner=None | *.A_log
matrix | *.mixer.{in,x,dt,out}_proj.weight
norm | *.norm*.weight
bias | *.bias *.D

= mamba2
embedding | backbone.embeddings.weight
head | lm_head.weight
depthwise | *.conv1d.weight
matrix | *.mixer.{in,out}_proj.weight
bias | *.mixer.{A_log,D,dt_bias,norm.weight} *.bias
norm | *.norm*.weight

= bert
embedding | *.word_embeddings.weight *.token_type_embeddings.weight
position | *.position_embeddings.weight
matrix | *.self.{query,key,value}.weight *.dense.weight
norm | *.LayerNorm.*
bias | *.bias

= bert-untied
embedding | *.word_embeddings.weight *.token_type_embeddings.weight
head | cls.predictions.decoder.weight
position | *.position_embeddings.weight
matrix | *.self.{query,key,value}.weight *.dense.weight
norm | *.LayerNorm.*
bias | *.bias

= bert-classes
embedding | *.word_embeddings.weight *.token_type_embeddings.weight
position | *.position_embeddings.weight
matrix | *.self.{query,key,value}.weight *.dense.weight classifier.weight
norm | *.LayerNorm.*
bias | *.bias

= roberta
embedding | *.word_embeddings.weight *.token_type_embeddings.weight
position | *.position_embeddings.weight
matrix | *.self.{query,key,value}.weight *.dense.weight
norm | *.LayerNorm.* *.layer_norm.*
bias | *.bias

= electra
embedding | *.word_embeddings.weight *.token_type_embeddings.weight
position | *.position_embeddings.weight
matrix | *.self.{query,key,value}.weight *.dense.weight *.embeddings_project.weight *.dense_prediction.weight
norm | *.LayerNorm.*
bias | *.bias

= modernbert
embedding | *.tok_embeddings.weight
fused split=3 | *.Wqkv.weight
matrix | *.attn.Wo.weight *.mlp.{Wi,Wo}.weight head.dense.weight
norm | *norm.weight
bias | *.bias

= deberta_v2
embedding | *.word_embeddings.weight
position | *.position_embeddings.weight *.rel_embeddings.weight
matrix | *.self.{query,key,value}_proj.weight *.self.pos_{key,query}_proj.weight *.dense.weight *.conv.conv.weight
norm | *.LayerNorm.*
bias | *.bias

= xlnet
embedding | *.word_embedding.weight
embedding | *.rel_attn.seg_embed
bias preconditioner=None | *.rel_attn.r_{w,r,s}_bias
bias | transformer.mask_emb
matrix | *.rel_attn.{q,k,v,o,r} *.ff.layer_{1,2}.weight
norm | *.layer_norm.*
bias | *.bias

= t5
embedding | shared.weight
position | *.relative_attention_bias.weight
matrix | *.SelfAttention.{q,k,v,o}.weight *.EncDecAttention.{q,k,v,o}.weight *.DenseReluDense.{wi,wo}.weight
norm | *norm.weight

= bart
embedding | model.shared.weight
position | *.embed_positions.weight
matrix | *_attn.{q,k,v,out}_proj.weight *.fc{1,2}.weight
norm | *norm.* *norm_embedding.*
bias | *.bias

= whisper
embedding | *.embed_tokens.weight
position | *.embed_positions.weight
matrix | *_attn.{q,k,v,out}_proj.weight *.fc{1,2}.weight *.conv{1,2}.weight
norm | *norm.*
bias | *.bias

= musicgen
embedding | *.embed_tokens.{0,1}.weight
head | lm_heads.{0,1}.weight
matrix | *_attn.{q,k,v,out}_proj.weight *.fc{1,2}.weight
norm | *norm.*

= wav2vec2
head | lm_head.weight
norm | *.pos_conv_embed.conv.parametrizations.weight.original0
matrix | *.pos_conv_embed.conv.parametrizations.weight.original1 *.conv_layers.{0,1}.conv.weight
matrix | *.projection.weight *.attention.{q,k,v,out}_proj.weight *.feed_forward.{intermediate,output}_dense.weight
norm | *norm.*
bias | *.bias *.masked_spec_embed

= conformer
head | lm_head.weight
norm | *.pos_conv_embed.conv.parametrizations.weight.original0
matrix | *.pos_conv_embed.conv.parametrizations.weight.original1 *.conv_layers.{0,1}.conv.weight
depthwise | *.depthwise_conv.weight
position | *.pos_bias_{u,v}
matrix | *.projection.weight *.self_attn.linear_{q,k,v,out,pos}.weight *.pointwise_conv{1,2}.weight
matrix | *.ffn{1,2}.{intermediate,output}_dense.weight
norm | *norm.*
bias | *.bias *.masked_spec_embed

= vit
position | *.cls_token *.position_embeddings
matrix | *.patch_embeddings.projection.weight *.attention.{q,k,v,o}_proj.weight *.mlp.fc{1,2}.weight classifier.weight
norm | *norm*.*
bias | *.bias

= beit
position | *.cls_token *.mask_token *.relative_position_bias_table
matrix | *.patch_embeddings.projection.weight *.attention.{q,k,v,o}_proj.weight *.mlp.fc{1,2}.weight classifier.weight
norm | *norm*.*
bias | *.bias *.lambda_{1,2}

= dinov2
position | *.cls_token *.mask_token *.register_tokens *.position_embeddings
matrix | *.patch_embeddings.projection.weight *.attention.{q,k,v,o}_proj.weight *.mlp.fc{1,2}.weight classifier.weight
norm | *norm*.*
bias | *.bias *.lambda1

= swin
position | *.relative_position_bias_table
matrix | *.patch_embeddings.projection.weight *.attention.{q,k,v,o}_proj.weight *.mlp.fc{1,2}.weight
matrix | *.downsample.reduction.weight classifier.weight
norm | *norm*.*
bias | *.bias

= swinv2
bias | *.logit_scale
matrix | *.patch_embeddings.projection.weight *.continuous_position_bias_mlp.{0,2}.weight *.self.{query,key,value}.weight
matrix | *.dense.weight *.downsample.reduction.weight classifier.weight
norm | *norm*.*
bias | *.bias

= convnext
depthwise | *.dwconv.weight
norm | *.downsampling_layer.0.*
matrix | *.patch_embeddings.weight *.pwconv{1,2}.weight *.downsampling_layer.1.weight classifier.weight
norm | *norm.*
bias | *.bias *.layer_scale_parameter

= resnet
matrix | *.convolution.weight classifier.1.weight
norm | *.normalization.*
bias | classifier.1.bias

= mobilenet
depthwise | *.conv_3x3.convolution.weight
matrix | *.convolution.weight classifier.weight
norm | *.normalization.*
bias | classifier.bias

= detr
position | model.query_position_embeddings.weight
matrix | *.convolution.weight *.input_projection.weight *_attn.{q,k,v,o}_proj.weight *.mlp.fc{1,2}.weight
matrix | class_labels_classifier.weight bbox_predictor.layers.{0,1,2}.weight
norm | *norm.*
bias | *.bias

= clip
embedding | *.token_embedding.weight
position | *.position_embedding.weight
matrix | *.patch_embedding.weight *.self_attn.{q,k,v,out}_proj.weight *.mlp.fc{1,2}.weight {text,visual}_projection.weight
norm | *norm*.*
bias | *.bias *.class_embedding logit_scale

= siglip
embedding | *.token_embedding.weight
position | *.position_embedding.weight *.head.probe
fused split=3 | *.head.attention.in_proj_weight
matrix | *.patch_embedding.weight *.self_attn.{q,k,v,out}_proj.weight *.mlp.fc{1,2}.weight
matrix | *.head.attention.out_proj.weight text_model.head.weight
norm | *norm*.*
bias | *bias logit_scale

= llava
embedding | *.embed_tokens.weight
head | lm_head.weight
position | *.position_embedding.weight
matrix | *.self_attn.{q,k,v,o,out}_proj.weight *.mlp.{gate,up,down}_proj.weight *.mlp.fc{1,2}.weight *.patch_embedding.weight
matrix | *.multi_modal_projector.linear_{1,2}.weight
norm | *norm*.*
bias | *.bias *.class_embedding

= perceiver
embedding | *.input_preprocessor.embeddings.weight
position | *.input_preprocessor.position_embeddings.weight *.embeddings.latents *.output_position_encodings.position_embeddings
matrix | *.self.{query,key,value}.weight *.dense.weight *.mlp.dense{1,2}.weight
norm | *norm*.*
bias | *.bias

= parakeet
bias preconditioner=None | *.self_attn.bias_{u,v}
depthwise | *.depthwise_conv.weight encoder.subsampling.layers.{2,5}.weight
matrix | encoder.subsampling.layers.{0,3,6}.weight encoder.subsampling.linear.weight *.pointwise_conv{1,2}.weight
matrix | *.feed_forward{1,2}.linear{1,2}.weight *.self_attn.{q,k,v,o,relative_k}_proj.weight ctc_head.weight
norm | *norm*.*
bias | *.bias

= timesformer
position | *.cls_token *.position_embeddings *.time_embeddings
fused split=3 | *.attention.qkv.weight
matrix | *.projection.weight *.dense.weight *.temporal_dense.weight classifier.weight
norm | *norm*.*
bias | *.bias

= speecht5
embedding | *.embed_tokens.weight
position | *.embed_positions.pe_k.weight
norm | *.original0
matrix | *.original1 *.conv.weight *.projection.weight *.{q,k,v,out}_proj.weight *_dense.weight
norm | *norm*.*
bias | *.bias *.masked_spec_embed

= zamba
embedding | *.embed_tokens.weight
depthwise | *.conv1d.weight
bias preconditioner=None | *.mamba.A_log *.mamba.D *.mamba.dt_proj_bias
matrix | *.mamba.{x,dt}_proj_weight *.mamba.{in,out}_proj.weight *.linear.weight
matrix | *.self_attn.{q,k,v,o}_proj.weight *.feed_forward.{gate,up,down}_proj.weight
norm | *norm.*
bias | *.bias

= nllb_moe
embedding | model.shared.weight
router | *.router.classifier.weight
matrix | *_attn.{q,k,v,out}_proj.weight *.cross_attention.{q,k,v,out}_proj.weight *.experts.expert_*.fc{1,2}.weight
norm | *norm.*
bias | *.bias

= granite_hybrid
embedding | *.embed_tokens.weight
head | lm_head.weight
router | *.router.weight
experts batch_dims=1 | *.experts.down_proj
fused batch_dims=1 split=2 split_dim=1 | *.experts.gate_up_proj
depthwise | *.conv1d.weight
matrix | *.mamba.{in,out}_proj.weight *.self_attn.{q,k,v,o}_proj.weight *.shared_mlp.{input,output}_linear.weight
bias | *.A_log *.D *.dt_bias *.bias *.mamba.norm.weight
norm | *norm.*

= ernie_moe
embedding | *.embed_tokens.weight
router | *.gate.weight
experts batch_dims=1 | *.experts.down_proj
fused batch_dims=1 split=2 split_dim=1 | *.experts.gate_up_proj
matrix | *.shared_experts.{gate,up,down}_proj.weight *.self_attn.{q,k,v,o}_proj.weight
norm | *norm.*
bias | *.e_score_correction_bias

= recurrent_gemma
embedding | *.embed_tokens.weight
depthwise | *.conv_1d.weight
bias preconditioner=None | *.rg_lru.{input,recurrent}_gate_bias
matrix | *.rg_lru.{input,recurrent}_gate_weight *.linear_{x,y,out}.weight *.temporal_block.{q,k,v,o}_proj.weight
matrix | *.mlp_block.{gate,up,down}_proj.weight
norm | *norm.*
bias | *.bias *.recurrent_param

= segformer
depthwise | *.dwconv.weight
matrix | *.attention.{q,k,v,o}_proj.weight *.sequence_reduction.weight *.mlp.fc{1,2}.weight *.proj.weight
matrix | decode_head.linear_fuse.weight decode_head.classifier.weight
norm | *norm*.*
bias | *.bias

= sam
position | *.positional_embedding *.pos_embed *.rel_pos_{h,w}
embedding | *.{iou_token,mask_tokens,no_mask_embed,not_a_point_embed}.weight *.point_embed.*.weight
fused split=3 | *.qkv.weight
norm | *norm*.*
matrix | *.{q,k,v,out}_proj.weight *.proj_{in,out}.weight *.layers.0.weight *.lin{1,2}.weight *.upscale_conv{1,2}.weight
matrix | *.mask_embed.conv{1,2,3}.weight *.attn.proj.weight *.neck.conv{1,2}.weight *.projection.weight
bias | *.bias

= blip2
embedding | *.embed_tokens.weight
position | *.embed_positions.weight *.position_embedding query_tokens
fused split=3 | *.qkv.weight
matrix | *.self_attn.{q,k,v,out}_proj.weight *.fc{1,2}.weight *.self_attn.projection.weight *.patch_embedding.weight
matrix | *.attention.{query,key,value}.weight *.dense.weight language_projection.weight
norm | *[nN]orm*.*
bias | *.bias *.class_embedding
"""


def build(name: str) -> nn.Module:
    kind, config = MODELS[name]
    model = getattr(transformers, kind)
    made: nn.Module = model(model.config_class(**config))
    return made


def expanded(pattern: str) -> list[str]:
    """``a{b,c}`` is ``ab`` and ``ac``."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    return ["".join(some) for some in itertools.product(*(part.split(",") if i % 2 else [part] for i, part in enumerate(parts)))]


def rows_of(name: str) -> list[tuple[str, str]]:
    """Kinds and patterns of names, in order."""
    for section in TABLE.split("\n= ")[1:]:
        names, *lines = section.strip().splitlines()
        if name in names.split():
            rows = [[part.strip() for part in line.split("|")] for line in lines]
            return [(kind, one) for kind, patterns in rows for some in patterns.split() for one in expanded(some)]
    raise KeyError(name)


def kind_of(group: dict[str, Any]) -> str:
    """The kind of a group, with options that are not the kind's own or say how it is cut."""
    kind = group["rule"].removeprefix("kind: ")
    usual = {name: value for name, value in KINDS.get(kind, {}).items() if name not in ("batch_dims", "split")}
    own = {name: value for name, value in group.items() if name not in ("params", "rule") and (name, value) not in usual.items()}
    text = [f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in own.items()]
    return " ".join(["matrix" if kind == "no rule" else kind, *text])


def kinds_in(model: nn.Module, **given: Any) -> dict[str, str]:
    return {name: kind_of(group) for group in lather.route(model, **given) for name, _ in group["params"]}


@pytest.mark.parametrize("name", MODELS)
def test_kinds(name: str) -> None:
    rows, used, wrong = rows_of(name), set(), {}
    for param, found in kinds_in(build(name)).items():
        row = next(((kind, pattern) for kind, pattern in rows if fnmatch.fnmatchcase(param, pattern)), ("not in the table", ""))
        used.add(row)
        if found != row[0]:
            wrong[param] = f"{found}, not {row[0]}"
    assert wrong == {}
    assert [row for row in rows if row not in used] == []


def test_every_model_is_in_the_table_once() -> None:
    names = [name for section in TABLE.split("\n= ")[1:] for name in section.splitlines()[0].split()]
    assert sorted(names) == sorted(MODELS)


# What transformers has no model for.


class Attention(nn.Module):
    """As in timm, where queries, keys and values are contiguous, unless they are ``head_first``."""

    def __init__(self, width: int, heads: int, head_first: bool = False) -> None:
        super().__init__()
        self.num_heads, self.head_first = heads, head_first
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(9, heads))


class VisionTransformer(nn.Module):
    """As in timm, with all that a table of positions or a token can be."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.reg_token = nn.Parameter(torch.zeros(1, 1, 12)), nn.Parameter(torch.zeros(1, 4, 12))
        self.pos_embed = nn.Parameter(torch.zeros(1, 17, 12))
        self.patch_embed = nn.Conv2d(3, 12, 4, 4)
        self.blocks = nn.ModuleList([Attention(12, 3), Attention(12, 3, head_first=True)])
        self.conv_dw, self.grouped = nn.Conv2d(12, 24, 3, groups=12), nn.Conv2d(12, 12, 3, groups=3)
        self.head = nn.Linear(12, 17)


def test_timm() -> None:
    """Its torchvision does not load beside torch's build for CPUs, so these look like its models."""
    found = {name: kind for name, kind in kinds_in(VisionTransformer()).items() if not name.endswith(".bias")}
    assert found == {
        **dict.fromkeys(["patch_embed.weight", "blocks.1.qkv.weight", "grouped.weight", "head.weight"], "matrix"),
        **dict.fromkeys(["blocks.0.proj.weight", "blocks.1.proj.weight"], "matrix"),
        **dict.fromkeys(["cls_token", "reg_token", "pos_embed"], "position"),
        **dict.fromkeys([f"blocks.{i}.relative_position_bias_table" for i in range(2)], "position"),
        **{"conv_dw.weight": "depthwise", "blocks.0.qkv.weight": "fused split=3"},
    }


class Stack(nn.Module):
    """Experts, with names that tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up, self.up_bias = nn.Parameter(torch.zeros(4, 8, 6)), nn.Parameter(torch.zeros(4, 6))
        self.other = nn.Parameter(torch.zeros(6, 8, 4))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.wg = nn.Linear(8, 4), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Conv1d(8, 8, 3) for _ in range(4))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w = nn.Linear(8, 8), Stack()
        self.conv = nn.Conv1d(8, 4, 3)


def test_experts_and_routers() -> None:
    """A gate is a router if it is beside experts. Convolutions are no stacks of matrices."""
    assert kinds_in(Sparse()) == {
        **{"gate.weight": "router", "wg.weight": "router", "gate.bias": "bias", "wg.bias": "bias"},
        **{f"experts.{i}.weight": "matrix" for i in range(4)},
        **{f"experts.{i}.bias": "bias" for i in range(4)},
    }
    assert kinds_in(Gated()) == {
        **{"gate.weight": "matrix", "gate.bias": "bias", "conv.weight": "matrix", "conv.bias": "bias"},
        **{"w.up": "experts batch_dims=1", "w.up_bias": "bias preconditioner=None", "w.other": "matrix"},
    }


def test_weight_norm() -> None:
    """Magnitudes are like the weights of norms; directions are what their layer would have."""
    old, new = torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm
    model = nn.Sequential(*(make(layer) for make in (old, new) for layer in (nn.Linear(8, 6), nn.Conv1d(8, 8, 3, groups=8))))
    found = {name: kind for name, kind in kinds_in(model).items() if not name.endswith(".bias")}
    assert found == {
        **{"0.weight_g": "norm", "0.weight_v": "matrix", "1.weight_g": "norm", "1.weight_v": "depthwise"},
        **{f"{i}.parametrizations.weight.original0": "norm" for i in (2, 3)},
        **{"2.parametrizations.weight.original1": "matrix", "3.parametrizations.weight.original1": "depthwise"},
    }


@pytest.mark.parametrize(
    "change",
    [lambda layer: prune.random_unstructured(layer, "weight", 0.3), torch.nn.utils.spectral_norm],
    ids=["prune", "spectral"],
)
def test_layers_that_keep_their_weight_under_another_name(change: Any) -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(8, 50), "conv": nn.Conv1d(8, 8, 3, groups=8)})
    for layer in model.values():
        change(layer)
    found = {name: kind for name, kind in kinds_in(model).items() if not name.endswith("bias")}
    assert found == {"lm_head.weight_orig": "head", "conv.weight_orig": "depthwise"}


def test_adapters_are_matrices() -> None:
    """Low-rank matrices go by no name of the layer that they are for, as in PEFT."""
    parts = {"base_layer": nn.Linear(8, 24), "lora_A": nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})}
    model = nn.ModuleDict({"c_attn": nn.ModuleDict(parts), "lm_head": nn.ModuleDict(parts), "embed_tokens": nn.ModuleDict(parts)})
    assert {kind for name, kind in kinds_in(model).items() if "lora" in name} == {"matrix"}


def lm(**layers: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"words": nn.Embedding(50, 8), "types": nn.Embedding(2, 8), **layers})


@pytest.mark.parametrize(
    ("layers", "heads"),
    [
        ({"head": nn.Linear(8, 50), "after": nn.Linear(50, 3)}, ["head.weight"]),  # not the last layer
        ({"output": nn.Linear(8, 64), "after": nn.Linear(64, 3)}, ["output.weight"]),  # padded
        ({"last": nn.Linear(8, 50)}, ["last.weight"]),  # by its shape alone
        ({"up": nn.Linear(8, 50), "down": nn.Linear(50, 8)}, []),  # a layer of the same shape
        ({"classifier": nn.Linear(8, 2)}, []),  # as many classes as types of tokens
        ({"head": nn.Linear(8, 10)}, []),  # classes
        ({"lm_head": nn.Linear(6, 70), "after": nn.Linear(70, 3)}, ["lm_head.weight"]),  # by its name alone
        ({"tables": nn.ParameterDict({"unembed": nn.Parameter(torch.zeros(8, 50))})}, ["tables.unembed"]),
        ({"tables": nn.ParameterDict({"head": nn.Parameter(torch.zeros(8, 50))})}, ["tables.head"]),  # as (inputs, outputs)
    ],
)
def test_heads(layers: dict[str, nn.Module], heads: list[str]) -> None:
    assert [name for name, kind in kinds_in(lm(**layers)).items() if kind == "head"] == heads


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_do_not_count() -> None:
    """Kinds are as for the bare model."""
    model = build("phi3")
    kinds = kinds_in(model)
    for wrapped in (Wrapper(model), torch.compile(model), torch.compile(Wrapper(model))):
        assert list(kinds_in(wrapped).values()) == list(kinds.values())  # type: ignore[arg-type]
    model.lm_head, attention = checkpoint_wrapper(model.lm_head), model.model.layers[0].self_attn  # type: ignore[union-attr,operator,index]
    attention.qkv_proj = torch.compile(attention.qkv_proj)
    assert list(kinds_in(model).values()) == list(kinds.values())


def test_kinds_can_be_ignored_one_by_one() -> None:
    """What is ignored goes to the next kind."""
    model = build("mixtral")
    ignored = kinds_in(model, kinds={"fused": None, "router": None})
    assert ignored["model.layers.0.mlp.experts.gate_up_proj"] == "experts batch_dims=1"
    assert ignored["model.layers.0.mlp.gate.weight"] == "matrix"
    assert kinds_in(build("gpt2"), kinds={"position": None})["transformer.wpe.weight"] == "embedding"
    whole = kinds_in(build("gpt2"), kinds={"fused": {}})
    assert whole["transformer.h.0.attn.c_attn.weight"] == "fused"
    assert set(kinds_in(model, kinds=None).values()) == {"matrix"}


# Models that people write by hand.


@pytest.mark.parametrize("head", ["head", "out", "proj", "fc", "lm_head", "to_logits", "unembed"])
@pytest.mark.parametrize("table", ["token", "tokens", "tok", "tok_emb", "token_embedding", "embed", "emb", "word", "wte", "0"])
def test_tables_and_heads_by_any_name(table: str, head: str) -> None:
    layers = {table: nn.Embedding(50, 8), "pos": nn.Embedding(16, 8), "up": nn.Linear(8, 32), "down": nn.Linear(32, 8)}
    kinds = kinds_in(nn.ModuleDict(layers | {head: nn.Linear(8, 50, bias=False)}))
    found = {name.removesuffix(".weight"): kind for name, kind in kinds.items() if name.endswith("weight")}
    assert found == {table: "embedding", "pos": "position", "up": "matrix", "down": "matrix", head: "head"}


class SparseMoE(nn.Module):
    """Gates are plain parameters here."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.w_gate, self.w_noise = nn.Parameter(torch.zeros(16, 4)), nn.Parameter(torch.zeros(16, 4))
        self.mixing, self.phi = nn.Parameter(torch.zeros(16, 16)), nn.Parameter(torch.zeros(16, 4, 2))
        self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))


class Odd(nn.Module):
    """Names and methods that mean something else than elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.W_rel, self.w_pos = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8, 8))
        self.rel_weight = nn.Parameter(torch.zeros(5, 8, 8))
        self.layer = nn.Linear(8, 8, bias=False)
        nn.utils.parametrize.register_parametrization(self.layer, "weight", LowRank())

    def get_input_embeddings(self) -> nn.Module:
        raise ValueError("there are several")


class LowRank(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight[:, :2], weight[:2]


def test_what_only_looks_like_another_kind() -> None:
    assert kinds_in(SparseMoE()) == {
        **dict.fromkeys(["mixing", "phi", *(f"experts.{i}.weight" for i in range(4))], "matrix"),
        **dict.fromkeys(["w_gate", "w_noise"], "router"),
    }
    assert set(kinds_in(Odd()).values()) == {"matrix"}


class States(nn.Module):
    """``D`` of a state space, for several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.D = nn.Parameter(torch.zeros(2, 8, 4)), nn.Parameter(torch.zeros(2, 8))


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hint, self.time, self.D = (nn.Parameter(torch.zeros(shape)) for shape in ((1, 6, 8), (1, 3, 4, 8), (6, 8)))
        self.latent_query, self.queries_embedder = nn.Parameter(torch.zeros(6, 8)), nn.Embedding(6, 8)
        self.image_positions = nn.ModuleDict({"rows": nn.Embedding(9, 8), "scale": nn.Linear(8, 8, bias=False)})
        self.bias_u, self.states = nn.Parameter(torch.zeros(4, 2)), States()
        self.experts = nn.ParameterDict({"up": torch.zeros(1, 8, 6)})
        self.router = nn.ParameterDict({"correction_bias": torch.zeros(1, 4)})
        self.audio_lm_head = nn.Linear(8, 32, bias=False)


def test_kinds_by_shapes_and_by_what_is_around() -> None:
    """``[1, n, d]`` is added to every item of a batch, unless it is a stack of one expert."""
    assert kinds_in(ByHand()) == {
        **dict.fromkeys(["hint", "time", "latent_query", "queries_embedder.weight", "image_positions.rows.weight"], "position"),
        **dict.fromkeys(["bias_u", "states.A_log", "states.D"], "bias preconditioner=None"),
        **{"router.correction_bias": "bias", "experts.up": "experts batch_dims=1", "audio_lm_head.weight": "head"},
        **dict.fromkeys(["D", "image_positions.scale.weight"], "matrix"),
    }


def test_what_torch_has() -> None:
    """Parts of a transformer, and recurrent layers, which are left whole."""
    found = kinds_in(nn.Transformer(8, 2, 1, 1, 16, batch_first=True))
    assert {name.split(".", 3)[-1] for name, kind in found.items() if kind == "fused split=3"} == {
        "self_attn.in_proj_weight",
        "multihead_attn.in_proj_weight",
    }
    layers = nn.Sequential(nn.LSTM(8, 6, 2, proj_size=4, bidirectional=True), nn.GRU(8, 6), nn.RNN(8, 6), nn.LSTMCell(8, 6))
    assert {name: kind for name, kind in kinds_in(layers).items() if kind != ("bias" if "bias" in name else "matrix")} == {}


# Training.


def loss_of(name: str, model: nn.Module) -> Tensor:
    if name == "vit":
        return model(pixel_values=torch.randn(4, 3, 16, 16), labels=torch.arange(4)).loss
    tokens = torch.randint(3, 96, (4, 12))
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("make", [lather.from_adamw, lather.soap, lather.muon], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("name", "matrices"),
    [
        ("gpt2", {"transformer.h.0.attn.c_attn.weight": 3}),
        ("mixtral", {"model.layers.0.mlp.experts.gate_up_proj": 8, "model.layers.0.mlp.experts.down_proj": 4}),
        ("phi3", {"model.layers.0.self_attn.qkv_proj.weight": 3, "model.layers.0.mlp.gate_up_proj.weight": 2}),
        ("dbrx", {"transformer.blocks.0.ffn.experts.mlp.w1": 4}),
        ("vit", {"classifier.weight": 1}),
    ],
)
def test_steps(name: str, matrices: dict[str, int], make: Any) -> None:
    """Stacks and parts are matrices of the method; the rest is Adam's."""
    model = build(name)
    opt = make(model, lr=1e-3, **{} if make is lather.muon else {"precondition_frequency": 2})
    rows = {row.name: row for row in opt.plan().params}
    method = {lather.from_adamw: "shampoo", lather.soap: "soap", lather.muon: "spectral"}[make]
    assert {param: (rows[param].method, rows[param].blocks) for param in matrices} == {
        param: (method, blocks) for param, blocks in matrices.items()
    }
    left = {param for param, kind in kinds_in(model).items() if kind.split()[0] not in ("matrix", "fused", "experts")}
    assert {rows[param].method for param in left} == {"adam"}
    before = {param: p.detach().clone() for param, p in model.named_parameters()}
    for _ in range(3):
        opt.zero_grad()
        loss_of(name, model).backward()
        opt.step()
    moved = {param: p for param, p in model.named_parameters() if not torch.equal(p, before[param])}
    assert moved.keys() >= matrices.keys() and all(p.isfinite().all() for p in moved.values())
