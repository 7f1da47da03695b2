"""Models of `transformers`, made from tiny configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.helpers.models.bases import Base
from tests.helpers.models.case import Case
from tests.helpers.models.data import dicts, images, renamed, sounds


class HuggingFace(Base):
    """A model of `transformers`, made from a tiny config, called the usual way."""

    def __init__(self, make: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        import transformers

        transformers.logging.set_verbosity_error()
        self.model = make(transformers)

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self(**batch).loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        output = self(**batch)
        return {"logits": output.logits, "loss": output.loss}


def gpt2(t: Any, **kwargs: Any) -> nn.Module:
    sizes = dict(n_layer=2, n_head=4, n_embd=32, n_positions=16, vocab_size=48, bos_token_id=1, eos_token_id=1)
    return t.GPT2LMHeadModel(t.GPT2Config(**sizes, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, **kwargs))


def bert(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=48)
    return t.BertForMaskedLM(
        t.BertConfig(**sizes, max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    )


def hf_vit(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=8)
    return t.ViTForImageClassification(
        t.ViTConfig(
            **sizes, patch_size=4, num_channels=1, num_labels=5, hidden_dropout_prob=0, attention_probs_dropout_prob=0
        )
    )


def whisper(t: Any) -> nn.Module:
    sizes = dict(d_model=32, num_mel_bins=6, max_source_positions=8, max_target_positions=8, vocab_size=48)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    config = t.WhisperConfig(**sizes, **heads, **tokens, encoder_layers=2, decoder_layers=2, dropout=0.0)
    return t.WhisperForConditionalGeneration(config)


def llama(t: Any, **kwargs: Any) -> nn.Module:
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, vocab_size=48, max_position_embeddings=16, **kwargs))


def mistral(t: Any) -> nn.Module:
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return t.MistralForCausalLM(t.MistralConfig(**sizes, vocab_size=48, max_position_embeddings=16, sliding_window=3))


def qwen3(t: Any) -> nn.Module:
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return t.Qwen3ForCausalLM(
        t.Qwen3Config(**sizes, head_dim=16, vocab_size=48, max_position_embeddings=16, tie_word_embeddings=True)
    )


def t5(t: Any) -> nn.Module:
    sizes = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=48)
    return t.T5ForConditionalGeneration(
        t.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, feed_forward_proj="gated-gelu")
    )


def gpt_neox(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=48)
    return t.GPTNeoXForCausalLM(
        t.GPTNeoXConfig(**sizes, max_position_embeddings=16, attention_dropout=0.0, hidden_dropout=0.0)
    )


def gemma2(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return t.Gemma2ForCausalLM(
        t.Gemma2Config(
            **sizes, num_key_value_heads=2, head_dim=8, vocab_size=48, sliding_window=4, query_pre_attn_scalar=8
        )
    )


def opt(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=48)
    return t.OPTForCausalLM(
        t.OPTConfig(**sizes, max_position_embeddings=16, dropout=0.0, attention_dropout=0.0, word_embed_proj_dim=24)
    )


def hugging_face(make: Callable[[Any], nn.Module], data: Callable[[int], list[Any]] | None = None) -> Case:
    return Case(lambda: HuggingFace(make), data or dicts(), casts=True)


ROWS: dict[str, Case] = {
    "hf_gpt2": hugging_face(gpt2),
    "hf_gpt2_eager": hugging_face(lambda t: gpt2(t, attn_implementation="eager"), dicts(masked=True)),
    "hf_bert": hugging_face(bert, dicts(masked=True)),
    "hf_whisper": hugging_face(whisper, sounds()),
    "hf_vit": hugging_face(hf_vit, renamed(images(), "pixel_values", "labels")),
    "hf_llama": hugging_face(llama),
    "hf_llama_eager": hugging_face(lambda t: llama(t, attn_implementation="eager"), dicts(masked=True)),
    "hf_mistral": hugging_face(mistral, dicts(masked=True)),
    "hf_qwen3": hugging_face(qwen3),
    "hf_gpt_neox": hugging_face(gpt_neox, dicts(masked=True)),
    "hf_gemma2": hugging_face(gemma2),
    "hf_opt": hugging_face(opt, dicts(masked=True)),
    "hf_t5": hugging_face(t5, dicts(seq2seq=True)),
}
