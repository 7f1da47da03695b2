"""Stems, layers and heads: what most programs are made of."""

from __future__ import annotations

from tests.fuzz.piece import Piece

BTC, BC = ("BTC",), ("BC",)

STEMS = {
    "BTC": (
        Piece("tokens", init="self.emb = nn.Embedding($V, $C)", glue="h = self.emb(x)"),
        Piece(
            "tokens_positions",
            init="self.emb, self.pos = nn.Embedding($V, $C), nn.Embedding(32, $C)",
            glue="h = self.emb(x) + self.pos(torch.arange(x.shape[1], device=x.device))",
        ),
        Piece(
            "tokens_padded",
            init="self.emb = nn.Embedding($V, $C, padding_idx=0)",
            glue="h = self.emb(x) * (x != 0).unsqueeze(-1)",
        ),
        Piece("series", init="self.emb = nn.Linear(3, $C)", glue="h = self.emb(x)"),
        Piece(
            "patches",
            init="self.emb = nn.Conv2d(3, $C, 2, 2)",
            glue="h = self.emb(x).flatten(2).transpose(1, 2)",
        ),
    ),
    "BC": (
        Piece("vectors", init="self.emb = nn.Linear(5, $C)", glue="h = self.emb(x)", weight=3),
        Piece(
            "convolution",
            init="""
                self.emb = nn.Sequential(nn.Conv2d(3, $C, 3, padding=1), nn.GroupNorm(2, $C), nn.ReLU(),
                                         nn.AdaptiveAvgPool2d(1), nn.Flatten())
            """,
            glue="h = self.emb(x)",
        ),
    ),
}

HEADS = {
    "BTC": (
        Piece("per_token", init="self.head = nn.Linear($C, $V)", glue="out = self.head(h)"),
        Piece("classes", init="self.head = nn.Linear($C, $V)", glue="out = self.head(h.mean(1))"),
        Piece("numbers", init="self.head = nn.Linear($C, 3)", glue="out = self.head(h[:, -1])"),
    ),
    "BC": (
        Piece("classes", init="self.head = nn.Linear($C, $V)", glue="out = self.head(h)"),
        Piece("numbers", init="self.head = nn.Linear($C, 3)", glue="out = self.head(h)"),
    ),
}

_CUSTOM = """
class Scale$i(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor + x.pow(2) * 0.1

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (ctx.factor + 0.2 * x), None
"""

_EXPERTS = """
logits = self.router$i(h.flatten(0, -2) if h.dim() == 3 else h)
flat = h.reshape(-1, h.shape[-1])
gate, chosen = logits.softmax(-1).max(-1)
mixed = torch.zeros_like(flat)
for number, expert in enumerate(self.experts$i):
    rows = (chosen == number).nonzero().squeeze(-1)
    if rows.numel():
        mixed.index_add_(0, rows, expert(flat[rows]) * gate[rows].unsqueeze(-1))
h = h + mixed.view_as(h)
"""

LAYERS = (
    Piece("linear", init="self.lin$i = nn.Linear($C, $C)", glue="h = self.lin$i(h)", weight=3),
    Piece(
        "mlp",
        init="self.up$i, self.down$i = nn.Linear($C, 2 * $C), nn.Linear(2 * $C, $C)",
        glue="h = h + self.down$i(F.gelu(self.up$i(h)))",
        weight=4,
    ),
    Piece(
        "swiglu",
        init="self.gate$i, self.up$i, self.down$i = nn.Linear($C, 10), nn.Linear($C, 10), nn.Linear(10, $C)",
        glue="h = h + self.down$i(F.silu(self.gate$i(h)) * self.up$i(h))",
        weight=2,
    ),
    Piece(
        "sequential",
        init="self.seq$i = nn.Sequential(nn.Linear($C, $C), nn.Tanh(), nn.Dropout(0.0), nn.Linear($C, $C))",
        glue="h = h + self.seq$i(h)",
        weight=2,
    ),
    Piece("layernorm", init="self.norm$i = nn.LayerNorm($C)", glue="h = self.norm$i(h)", weight=4),
    Piece("rmsnorm", init="self.norm$i = nn.RMSNorm($C)", glue="h = self.norm$i(h)"),
    Piece(
        "rms_by_hand",
        init="self.gain$i = nn.Parameter(torch.ones($C))",
        glue="h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain$i",
    ),
    Piece("groupnorm", init="self.norm$i = nn.GroupNorm(2, $C)", glue="h = self.norm$i(h)", on=BC),
    Piece("batchnorm", init="self.norm$i = nn.BatchNorm1d($C)", glue="h = self.norm$i(h)", on=BC),
    Piece(
        "batchnorm_tokens",
        init="self.norm$i = nn.BatchNorm1d($C)",
        glue="h = self.norm$i(h.transpose(1, 2)).transpose(1, 2)",
        on=BTC,
        weight=0.5,
    ),
    Piece(
        "attention",
        init="self.qkv$i, self.proj$i = nn.Linear($C, 3 * $C), nn.Linear($C, $C)",
        glue="""
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv$i(h).chunk(3, -1))
            h = h + self.proj$i(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        """,
        on=BTC,
        weight=4,
    ),
    Piece(
        "attention_by_hand",
        init="self.q$i, self.k$i, self.v$i = nn.Linear($C, $C), nn.Linear($C, $C), nn.Linear($C, $C)",
        glue="""
            scores = self.q$i(h) @ self.k$i(h).transpose(-2, -1) / math.sqrt(h.size(-1))
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float('-inf'))
            h = h + scores.softmax(-1) @ self.v$i(h)
        """,
        on=BTC,
        weight=3,
    ),
    Piece(
        "multihead",
        init="self.mha$i = nn.MultiheadAttention($C, 2, batch_first=True)",
        glue="h = h + self.mha$i(h, h, h, need_weights=False)[0]",
        on=BTC,
        weight=2,
    ),
    Piece(
        "encoder_layer",
        init="self.enc$i = nn.TransformerEncoderLayer($C, 2, 16, dropout=0.0, batch_first=True)",
        glue="h = self.enc$i(h)",
        on=BTC,
        weight=2,
    ),
    Piece("lstm", init="self.rnn$i = nn.LSTM($C, $C, batch_first=True)", glue="h = self.rnn$i(h)[0]", on=BTC),
    Piece(
        "gru_last",
        init="self.rnn$i = nn.GRU($C, $C, 2, batch_first=True)",
        glue="""
            seq, last = self.rnn$i(h)
            h = seq + last[-1].unsqueeze(1)
        """,
        on=BTC,
    ),
    Piece("gru_cell", init="self.cell$i = nn.GRUCell($C, $C)", glue="h = self.cell$i(h, torch.zeros_like(h))", on=BC),
    Piece(
        "conv",
        init="self.conv$i = nn.Conv1d($C, $C, 3, padding=1)",
        glue="h = h + self.conv$i(h.transpose(1, 2)).transpose(1, 2)",
        on=BTC,
    ),
    Piece(
        "causal_conv",
        init="self.conv$i = nn.Conv1d($C, $C, 3, groups=$C)",
        glue="h = h + self.conv$i(F.pad(h.transpose(1, 2), (2, 0))).transpose(1, 2)",
        on=BTC,
    ),
    Piece("scale", init="self.s$i = nn.Parameter(torch.ones($C))", glue="h = h * self.s$i"),
    Piece("prelu", init="self.act$i = nn.PReLU()", glue="h = self.act$i(h)"),
    Piece("relu", glue="h = F.relu(h) + 0.1 * h"),
    Piece(
        "raw_weights",
        init="""
            self.w$i = nn.Parameter(torch.randn($C, $C) * 0.2)
            self.b$i = nn.Parameter(torch.zeros($C))
        """,
        glue="h = h + torch.tanh(h @ self.w$i + self.b$i)",
        weight=2,
    ),
    Piece(
        "einsum",
        init="self.w$i = nn.Parameter(torch.randn(2, $C, $C) * 0.2)",
        glue="h = h + torch.einsum('...c,kcd->...d', h, self.w$i)",
    ),
    Piece(
        "bilinear",
        init="self.bi$i = nn.Bilinear($C, $C, $C)",
        glue="h = h + self.bi$i(h, h.tanh()) * 0.1",
        weight=0.5,
    ),
    Piece(
        "lora",
        init="""
            self.base$i, self.a$i, self.bb$i = nn.Linear($C, $C), nn.Linear($C, 2, bias=False), nn.Linear(2, $C)
            self.base$i.requires_grad_(False)
        """,
        glue="h = self.base$i(h) + 0.5 * self.bb$i(self.a$i(h))",
    ),
    Piece(
        "tied_pair",
        init="""
            self.one$i, self.two$i = nn.Linear($C, $C), nn.Linear($C, $C)
            self.two$i.weight = self.one$i.weight
        """,
        glue="h = h + self.two$i(F.silu(self.one$i(h)))",
    ),
    Piece(
        "transposed_tie",
        init="self.one$i = nn.Linear($C, 6)",
        glue="h = h + F.linear(torch.sigmoid(self.one$i(h)), self.one$i.weight.t())",
    ),
    Piece("shared_twice", init="self.lin$i = nn.Linear($C, $C)", glue="h = self.lin$i(torch.tanh(self.lin$i(h)))"),
    Piece(
        "module_list",
        init="self.list$i = nn.ModuleList(nn.Linear($C, $C) for _ in range(3))",
        glue="""
            outs = [h]
            for layer in self.list$i:
                outs.append(torch.relu(layer(outs[-1])) + outs[0])
            h = torch.stack(outs).mean(0)
        """,
        weight=2,
    ),
    Piece(
        "module_dict",
        init="self.dict$i = nn.ModuleDict({'a': nn.Linear($C, $C), 'b': nn.Linear($C, $C)})",
        glue="h = sum(layer(h) for name, layer in self.dict$i.items()) / 2",
    ),
    Piece(
        "checkpointed",
        init="self.lin$i = nn.Linear($C, $C)",
        glue="h = h + checkpoint(lambda z: torch.tanh(self.lin$i(z)), h, use_reentrant=False)",
    ),
    Piece(
        "checkpointed_reentrant",
        init="self.seq$i = nn.Sequential(nn.Linear($C, $C), nn.GELU())",
        glue="h = h + checkpoint(self.seq$i, h, use_reentrant=True)",
    ),
    Piece(
        "weight_norm",
        init="self.wn$i = nn.utils.parametrizations.weight_norm(nn.Linear($C, $C))",
        glue="h = h + self.wn$i(h)",
    ),
    Piece(
        "spectral_norm",
        init="self.sn$i = nn.utils.parametrizations.spectral_norm(nn.Linear($C, $C))",
        glue="h = h + self.sn$i(h)",
        weight=0.5,
    ),
    Piece(
        "orthogonal",
        init="self.on$i = nn.utils.parametrizations.orthogonal(nn.Linear($C, $C, bias=False))",
        glue="h = h + self.on$i(h)",
        weight=0.5,
    ),
    Piece("custom_function", top=_CUSTOM, glue="h = Scale$i.apply(h, 0.5)"),
    Piece(
        "experts",
        init="""
            self.router$i = nn.Linear($C, 2)
            self.experts$i = nn.ModuleList(nn.Linear($C, $C) for _ in range(2))
        """,
        glue=_EXPERTS,
        weight=0.7,
    ),
    Piece(
        "gated_heads",
        init="self.g$i = nn.Parameter(torch.zeros(2)); self.lin$i = nn.Linear($C, $C)",
        glue="h = (self.lin$i(h).unflatten(-1, (2, -1)) * torch.sigmoid(self.g$i)[:, None]).flatten(-2)",
    ),
    Piece(
        "quantized_weight",
        init="self.w$i = nn.Parameter(torch.randn($C, $C) * 0.3)",
        glue="""
            q = self.w$i + ((self.w$i * 8).round() / 8 - self.w$i).detach()
            h = h + F.linear(h, q)
        """,
    ),
    Piece(
        "normalized_weight",
        init="self.w$i = nn.Parameter(torch.randn($C, $C))",
        glue="h = h + F.linear(F.normalize(h, dim=-1), F.normalize(self.w$i, dim=1))",
    ),
    Piece(
        "weight_standardized",
        init="self.lin$i = nn.Linear($C, $C)",
        glue="""
            weight = self.lin$i.weight
            weight = (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-5)
            h = h + F.linear(h, weight, self.lin$i.bias)
        """,
    ),
    Piece(
        "codebook",
        init="self.codes$i = nn.Parameter(torch.randn(5, $C))",
        glue="""
            near = torch.cdist(h.reshape(-1, h.shape[-1]), self.codes$i).argmin(-1)
            picked = self.codes$i[near].view_as(h)
            h = h + (picked - h).detach() + 0.1 * picked
        """,
    ),
    Piece(
        "carried_state",
        init="self.lin$i = nn.Linear($C, $C); self.carry$i = None",
        glue="""
            if self.carry$i is None or self.carry$i.shape != h.shape:
                self.carry$i = torch.zeros_like(h)
            h = h + self.lin$i(self.carry$i)
            self.carry$i = h.detach()
        """,
        weight=0.3,
    ),
    Piece(
        "functional_call",
        init="self.lin$i = nn.Linear($C, $C)",
        glue="h = h + torch.func.functional_call(self.lin$i, {'weight': self.lin$i.weight * 0.5}, (h,))",
        weight=0.5,
    ),
    Piece(
        "noise",
        glue="h = h + 0.01 * torch.randn_like(h)",
        draws=True,
        weight=0.15,
    ),
    Piece("dropout", init="self.drop$i = nn.Dropout(0.2)", glue="h = self.drop$i(h)", draws=True, weight=0.15),
)
