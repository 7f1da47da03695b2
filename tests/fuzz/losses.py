"""Losses: lines that read ``out``, ``x``, ``y``, ``w`` (a weight a sample) and ``m`` (a mask), and leave ``loss``."""

from __future__ import annotations

from tests.fuzz.piece import Piece

_ROWS = """
class SumOverRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, target):
        ctx.save_for_backward(out, target)
        return (out - target).pow(2).sum() / out.shape[0]

    @staticmethod
    def backward(ctx, grad):
        out, target = ctx.saved_tensors
        return grad * 2 * (out - target) / out.shape[0], None
"""

_CRITERION = """
class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('seen', torch.zeros(()))
        self.calls = 0

    def forward(self, out, y):
        self.calls += 1
        if self.training:
            self.seen += len(out)
        return F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction='none').view_as(y).sum() / len(out)
"""

# logits (..., V) and targets (...)
CLASSES = (
    Piece("ce", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten())", weight=3),
    Piece("ce_smooth", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten(), label_smoothing=0.1)"),
    Piece("ce_ignore", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten(), ignore_index=0)"),
    Piece("ce_masked_target", glue="y = y.masked_fill(~m, -100)\nloss = F.cross_entropy(out.flatten(0, -2), y.flatten())"),
    Piece("ce_weight", init="self.register_buffer('cw', torch.linspace(0.5, 1.5, $V))", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten(), weight=self.cw)"),
    Piece("ce_sum", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction='sum') / y.shape[0]"),
    Piece("ce_numel", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction='sum') / y.numel()"),
    Piece("ce_masked_mean", glue="l = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction='none')\nloss = (l * m.flatten()).sum() / m.sum()"),
    Piece("ce_masked_clamp", glue="l = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction='none')\nloss = (l * m.flatten()).sum() / m.sum().clamp(min=1)"),
    Piece("ce_kept", glue="loss = F.cross_entropy(out[m], y[m])", weight=1.5),
    Piece("ce_kept_count", glue="n = max(1, int(m.sum()))\nloss = F.cross_entropy(out[m], y[m], reduction='sum') / n"),
    Piece("ce_sample_weight", glue="l = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction='none').view_as(y)\nl = l if l.dim() == 1 else l.mean(1)\nloss = (l * w).sum() / w.sum()"),
    Piece("ce_normed_weight", glue="l = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction='none').view_as(y)\nl = l if l.dim() == 1 else l.mean(1)\nloss = (l * w.softmax(0)).sum()"),
    Piece("focal", glue="p = out.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)\nloss = -((1 - p.exp()) ** 2 * p).mean()"),
    Piece("nll", glue="loss = F.nll_loss(out.flatten(0, -2).log_softmax(-1), y.flatten())"),
    Piece("by_hand", glue="loss = -(out.log_softmax(-1) * F.one_hot(y, $V)).sum(-1).mean()"),
    Piece("hard_examples", glue="l = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction='none')\nloss = l.topk(3).values.mean()"),
    Piece("hard_above_mean", glue="l = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction='none')\nloss = l[l >= l.detach().mean()].mean()"),
    Piece("median", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction='none').median()", weight=0.5),
    Piece("logsumexp", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction='none').logsumexp(0)", weight=0.7),
    Piece("worst_sample", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction='none').max()", weight=0.7),
    Piece("prior", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten()) + (out.softmax(-1).flatten(0, -2).mean(0) ** 2).sum()"),
    Piece("class_counts", glue="n = torch.bincount(y.flatten(), minlength=$V).double()\nloss = F.cross_entropy(out.flatten(0, -2), y.flatten(), weight=(1 / (n + 1)).to(out))"),
    Piece("bce_onehot", glue="loss = F.binary_cross_entropy_with_logits(out, F.one_hot(y, $V).to(out), pos_weight=torch.full(($V,), 2.0).to(out))"),
    Piece("kl", glue="t = F.one_hot(y, $V).to(out) * 0.9 + 0.1 / $V\nloss = F.kl_div(out.log_softmax(-1), t, reduction='batchmean')"),
    Piece("margin", glue="loss = F.multi_margin_loss(out.flatten(0, -2), y.flatten())", weight=0.7),
    Piece("criterion_module", top=_CRITERION, init="self.criterion = Criterion()", glue="loss = self.criterion(out, y)", weight=1.5),
    Piece("per_class_loop", glue="parts = [F.cross_entropy(out[y == c], y[y == c]) for c in y.unique().tolist()]\nloss = torch.stack(parts).mean()"),
    Piece("loop_samples_loss", glue="loss = sum(F.cross_entropy(o.reshape(-1, o.shape[-1]), t.reshape(-1)) for o, t in zip(out, y)) / len(out)"),
    Piece("temperature", init="self.logit_scale = nn.Parameter(torch.tensor(0.5))", glue="loss = F.cross_entropy((out * self.logit_scale.exp()).flatten(0, -2), y.flatten())"),
    Piece("z_loss", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten()) + 1e-2 * out.logsumexp(-1).pow(2).mean()"),
    Piece("accuracy_scaled", glue="acc = (out.argmax(-1) == y).double().mean()\nloss = F.cross_entropy(out.flatten(0, -2), y.flatten()) * (2 - acc.to(out))"),
    Piece("accuracy_item", glue="acc = (out.argmax(-1) == y).double().mean().item()\nloss = F.cross_entropy(out.flatten(0, -2), y.flatten()) * (2 - acc)"),
    Piece("metric_loss", init="self.metric = torchmetrics.MeanSquaredError()", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten())\nself.metric(out.detach().sum(-1).flatten(), y.flatten().to(out))\nself.log('mse', self.metric)"),
    Piece("accuracy_logged", init="self.acc = torchmetrics.Accuracy(task='multiclass', num_classes=$V)", glue="loss = F.cross_entropy(out.flatten(0, -2), y.flatten())\nself.acc(out.flatten(0, -2), y.flatten())\nself.log('acc', self.acc, on_step=True, on_epoch=True)"),
)  # fmt: skip

# out (B, 3) and y (B, 3)
NUMBERS = (
    Piece("mse", glue="loss = F.mse_loss(out, y)", weight=3),
    Piece("mse_sum", glue="loss = F.mse_loss(out, y, reduction='sum') / len(y)"),
    Piece("mse_plain_sum", glue="loss = (out - y).pow(2).sum()"),
    Piece("l1", glue="loss = F.l1_loss(out, y)"),
    Piece("huber", glue="loss = F.huber_loss(out, y, delta=0.5)"),
    Piece("smooth", glue="loss = F.smooth_l1_loss(out, y)"),
    Piece("gaussian", glue="loss = F.gaussian_nll_loss(out, y, F.softplus(out) + 0.1)"),
    Piece("poisson", glue="loss = F.poisson_nll_loss(out, y.abs())"),
    Piece("quantiles", glue="e = y - out\nq = torch.tensor([0.1, 0.5, 0.9]).to(out)\nloss = torch.maximum(q * e, (q - 1) * e).sum(-1).mean()"),
    Piece("rmse", glue="loss = torch.sqrt(F.mse_loss(out, y))"),
    Piece("cosine", glue="loss = 1 - F.cosine_similarity(out, y, dim=-1).mean()"),
    Piece("cosine_flat", glue="loss = 1 - F.cosine_similarity(out.flatten(), y.flatten(), dim=0)"),
    Piece("correlation", glue="a, b = out - out.mean(0), y - y.mean(0)\nloss = -(a * b).sum() / (a.norm() * b.norm() + 1e-3)"),
    Piece("dice", glue="p, t = out.sigmoid(), (y > 0).to(out)\nloss = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)"),
    Piece("r2", glue="loss = (out - y).pow(2).sum() / (y - y.mean(0)).pow(2).sum()"),
    Piece("contrastive", glue="a, b = F.normalize(out, dim=-1), F.normalize(y, dim=-1)\nloss = F.cross_entropy(a @ b.t() / 0.5, torch.arange(len(a), device=a.device))"),
    Piece("triplet", glue="loss = F.triplet_margin_loss(out, y, out.roll(1, 0).detach())"),
    Piece("pairs", glue="i, j = torch.triu_indices(len(out), len(out), 1)\nloss = (out[i] - out[j]).pow(2).sum(-1).sub((y[i] - y[j]).pow(2).sum(-1)).abs().mean()"),
    Piece("variance", glue="loss = F.mse_loss(out, y) + F.relu(1 - out.std(0)).mean()"),
    Piece("covariance", glue="z = out - out.mean(0)\nc = z.t() @ z / max(1, len(z) - 1)\nloss = F.mse_loss(out, y) + 0.1 * c.pow(2).sum()"),
    Piece("masked_rows", glue="loss = F.mse_loss(out[m], y[m]) if m.any() else out.sum() * 0"),
    Piece("masked_where", glue="loss = torch.where(m.unsqueeze(-1), (out - y).abs(), torch.zeros_like(out)).sum() / (3 * m.sum() + 1)"),
    Piece("weighted", glue="loss = ((out - y).pow(2).mean(-1) * w).mean()"),
    Piece("weighted_norm", glue="loss = ((out - y).pow(2).mean(-1) * w).sum() / w.sum()"),
    Piece("custom_rows", top=_ROWS, glue="loss = SumOverRows.apply(out, y)"),
    Piece("trimmed", glue="e = (out - y).pow(2).mean(-1)\nloss = e.sort().values[:-1].mean() if len(e) > 1 else e.mean()"),
    Piece("amax", glue="loss = (out - y).abs().amax(0).mean()"),
    Piece("norm_loss", glue="loss = torch.linalg.vector_norm(out - y)"),
    Piece("scaled_by_item", glue="e = (out - y).abs()\nloss = (e / (1 + e.mean().item())).pow(2).mean()"),
    Piece("scaled_by_detached", glue="e = (out - y).abs()\nloss = (e / (1 + e.detach().max())).pow(2).mean()"),
    Piece("python_threshold", glue="e = F.mse_loss(out, y)\nloss = e if e.item() < 2 else 2 * e"),
    Piece("distribution", glue="loss = -torch.distributions.Normal(out, 1.0, validate_args=False).log_prob(y).mean()"),
    Piece("learned_weights", init="self.log_vars = nn.Parameter(torch.zeros(3))", glue="e = (out - y).pow(2).mean(0)\nloss = (torch.exp(-self.log_vars) * e + self.log_vars).sum()"),
    Piece("metric_as_loss", init="self.criterion = torchmetrics.MeanAbsoluteError()", glue="loss = self.criterion(out, y) + F.mse_loss(out, y)", weight=0.5),
    Piece("metric_state", init="self.mae = torchmetrics.MeanAbsoluteError()", glue="loss = F.mse_loss(out, y)\nself.mae.update(out, y)\nself.log('mae', self.mae, on_step=False, on_epoch=True)"),
    Piece("metric_collection", init="self.mc = torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()])", glue="loss = F.mse_loss(out, y)\nself.log_dict(self.mc(out, y))"),
    Piece("gradient_penalty", glue="(g,) = torch.autograd.grad(out.sum(), out, create_graph=True) if out.requires_grad else (out,)\nloss = F.mse_loss(out, y) + g.mean()", weight=0.3),
)  # fmt: skip

LOSSES = {"per_token": CLASSES, "classes": CLASSES, "numbers": NUMBERS}
PLAIN_LOSSES = {"per_token": CLASSES[0], "classes": CLASSES[0], "numbers": NUMBERS[0]}
