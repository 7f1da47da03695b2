"""The commonest families of `transformers`, from tiny configs, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as t
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strangers.stranger import Stranger, with_trainer

SAMPLES, LENGTH, WORDS, BATCH = 48, 12, 96, 8
_SIZES: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
_WORDS: dict[str, Any] = dict(vocab_size=WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_TEXT: dict[str, Any] = {**_SIZES, **_WORDS, "max_position_embeddings": 32}
_LM: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2}
_DRY: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


class Trained(LightningModule):
    """A model with its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (SAMPLES, length), generator=torch.Generator().manual_seed(1))


def _noise(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(2))


def _mask() -> Tensor:
    lengths = torch.arange(SAMPLES) % 5 + LENGTH - 4
    return (torch.arange(LENGTH) < lengths[:, None]).long()


def texts(masked: bool = True) -> dict[str, Tensor]:
    """Each token is its own label; padding has none."""
    x = _tokens()
    if not masked:
        return dict(input_ids=x, labels=x)
    mask = _mask()
    return dict(input_ids=x * mask, attention_mask=mask, labels=x.masked_fill(mask == 0, -100))


def sentences() -> dict[str, Tensor]:
    """Whole texts have a class."""
    return dict(input_ids=_tokens() * _mask(), attention_mask=_mask(), labels=torch.arange(SAMPLES) % 3)


def pairs() -> dict[str, Tensor]:
    """Texts to be translated."""
    return dict(input_ids=_tokens() * _mask(), attention_mask=_mask(), labels=_tokens(8))


def images() -> dict[str, Tensor]:
    return dict(pixel_values=_noise(3, 16, 16), labels=torch.arange(SAMPLES) % 5)


def captions() -> dict[str, Any]:
    return dict(input_ids=_tokens(), attention_mask=_mask(), pixel_values=_noise(3, 16, 16))


def sounds() -> dict[str, Tensor]:
    return dict(input_features=_noise(8, 16), labels=_tokens(6))


def waves() -> dict[str, Tensor]:
    return dict(input_values=_noise(400), labels=torch.arange(SAMPLES) % 3)


def _samples(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return ({name: x[i] for name, x in data.items()} for i in range(SAMPLES))


def loader_of(data: dict[str, Any], **fixed: Any) -> Any:
    """Batches of what ``data`` has for each sample, and ``fixed``."""

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {**torch.utils.data.default_collate(samples), **fixed}

    return DataLoader(list(_samples(data)), batch_size=BATCH, collate_fn=collate)


def _stranger(make: Callable[[], nn.Module], data: Callable[[], dict[str, Any]], **more: Any) -> Stranger:
    def module() -> LightningModule:
        t.logging.set_verbosity_error()
        return Trained(make().train())

    def loader() -> Any:
        return loader_of(data(), **({"return_loss": True} if data is captions else {}))

    return with_trainer(module, loader, **{"transformer": True, "sequence": True, "microbatches": BATCH, **more})


def _clip() -> nn.Module:
    text: dict[str, Any] = {**_TEXT, "projection_dim": 16}
    vision = dict(**_SIZES, image_size=16, patch_size=4, projection_dim=16)
    return t.CLIPModel(t.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _whisper() -> nn.Module:
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)
    sizes = dict(d_model=32, num_mel_bins=8, max_source_positions=8, max_target_positions=16, decoder_start_token_id=1)
    return t.WhisperForConditionalGeneration(
        t.WhisperConfig(**sizes, **heads, **_WORDS, encoder_layers=2, decoder_layers=2, dropout=0.0)
    )


def _bart() -> nn.Module:
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)
    dry = dict(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2, max_position_embeddings=32)
    return t.BartForConditionalGeneration(t.BartConfig(**sizes, **heads, **dry, **_WORDS, decoder_start_token_id=2))


def _wav2vec2() -> nn.Module:
    dry = dict(hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0)
    convolutions = dict(conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2)
    positions = dict(num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=16)
    more = dict(final_dropout=0.0, mask_time_prob=0.0, apply_spec_augment=False, num_labels=3)
    return t.Wav2Vec2ForSequenceClassification(
        t.Wav2Vec2Config(**_SIZES, **_WORDS, **dry, **convolutions, **positions, **more)
    )


def _deepseek_v3() -> nn.Module:
    heads = dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8)
    experts = dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1)
    more = dict(moe_intermediate_size=16, first_k_dense_replace=1, v_head_dim=8)
    return t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**_TEXT, **heads, **experts, **more))


def _gpt_oss() -> nn.Module:
    experts = dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4)
    return t.GptOssForCausalLM(t.GptOssConfig(**_LM, **experts))


# Experts run as grouped products, which know no float64.
_MIXED: dict[str, Any] = dict(precision="32-true", tolerance=1e-5)

STRANGERS: dict[str, Stranger] = {
    "bert": _stranger(lambda: t.BertForMaskedLM(t.BertConfig(**_TEXT, **_DRY)), texts),
    "roberta": _stranger(lambda: t.RobertaForMaskedLM(t.RobertaConfig(**_TEXT, **_DRY)), texts),
    "distilbert": _stranger(
        lambda: t.DistilBertForSequenceClassification(
            t.DistilBertConfig(
                **_WORDS,
                dim=32,
                hidden_dim=64,
                n_layers=2,
                n_heads=4,
                max_position_embeddings=32,
                dropout=0.0,
                attention_dropout=0.0,
                seq_classif_dropout=0.0,
                num_labels=3,
            )
        ),
        sentences,
    ),
    "deberta_v2": _stranger(
        lambda: t.DebertaV2ForSequenceClassification(
            t.DebertaV2Config(
                **{**_TEXT, "num_hidden_layers": 4},
                **_DRY,
                relative_attention=True,
                pos_att_type=["p2c", "c2p"],
                position_buckets=8,
                pooler_dropout=0.0,
                num_labels=3,
                pooler_hidden_size=32,
            )
        ),
        sentences,
        microbatches=1,  # its loss gathers the samples that have a label
    ),
    "electra": _stranger(
        lambda: t.ElectraForSequenceClassification(
            t.ElectraConfig(**_TEXT, **_DRY, embedding_size=16, summary_last_dropout=0.0, num_labels=3)
        ),
        sentences,
    ),
    "gpt2": _stranger(
        lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                **_WORDS,
                n_layer=2,
                n_head=4,
                n_embd=32,
                n_positions=32,
                attn_pdrop=0.0,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
            )
        ),
        texts,
    ),
    "llama": _stranger(lambda: t.LlamaForCausalLM(t.LlamaConfig(**_LM)), texts),
    "mistral": _stranger(lambda: t.MistralForCausalLM(t.MistralConfig(**_LM, sliding_window=4)), texts),
    "qwen2": _stranger(lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**_LM)), texts),
    "qwen3": _stranger(lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**_LM, head_dim=8)), texts),
    "gemma3": _stranger(
        lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**_LM, head_dim=8, sliding_window=4, query_pre_attn_scalar=8)),
        texts,
    ),
    "phi3": _stranger(lambda: t.Phi3ForCausalLM(t.Phi3Config(**_LM)), texts),
    "t5": _stranger(
        lambda: t.T5ForConditionalGeneration(
            t.T5Config(
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                vocab_size=WORDS,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                pad_token_id=0,
            )
        ),
        pairs,
    ),
    "bart": _stranger(_bart, pairs),
    "whisper": _stranger(_whisper, sounds),
    "wav2vec2": _stranger(_wav2vec2, waves),
    "clip": _stranger(_clip, captions, microbatches=1),  # it compares all samples
    "vit": _stranger(
        lambda: t.ViTForImageClassification(t.ViTConfig(**_SIZES, **_DRY, image_size=16, patch_size=4, num_labels=5)),
        images,
    ),
    "dinov2": _stranger(
        lambda: t.Dinov2ForImageClassification(
            t.Dinov2Config(
                hidden_size=32,
                mlp_ratio=2,
                num_hidden_layers=2,
                num_attention_heads=4,
                **_DRY,
                image_size=16,
                patch_size=4,
                num_labels=5,
            )
        ),
        images,
    ),
    "mixtral": _stranger(
        lambda: t.MixtralForCausalLM(t.MixtralConfig(**_LM, num_local_experts=4, output_router_logits=True)),
        texts,
        **_MIXED,
        microbatches=1,  # its loss goes by the load of the experts
    ),
    "qwen3_moe": _stranger(
        lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(**_LM, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
        ),
        texts,
        **_MIXED,
    ),
    "deepseek_v3": _stranger(_deepseek_v3, texts, **_MIXED),
    "gpt_oss": _stranger(_gpt_oss, texts, **_MIXED),
}
