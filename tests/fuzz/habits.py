"""Habits of users' steps: state in attributes, class bodies and globals, teachers, logs, hooks, what begins later."""

from __future__ import annotations

from tests.fuzz.piece import Piece

# Within a module, beside its layers.
INNER = (
    Piece("calls", init="self.calls$i = 0", glue="self.calls$i += 1"),
    Piece("norms", init="self.norms$i = []", glue="self.norms$i.append(h.detach().norm().item())", weight=0.6),
    Piece("kept", init="self.kept$i = None", glue="self.kept$i = h.detach()", weight=0.7),
    Piece("kept_graph", init="self.kept$i = None", glue="self.kept$i = h", weight=0.4),
    Piece("kept_shape", init="self.shape$i = None", glue="self.shape$i = tuple(h.shape)"),
    Piece("largest_seen", init="self.most$i = 0", glue="self.most$i = max(self.most$i, h.shape[0])"),
    Piece("running_mean", init="self.register_buffer('run$i', torch.zeros($C))", glue="if self.training:\n    self.run$i.mul_(0.9).add_(h.detach().flatten(0, -2).mean(0), alpha=0.1)\nh = h - self.run$i"),
    Piece("running_absmax", init="self.register_buffer('top$i', torch.zeros(()))", glue="if self.training:\n    self.top$i.copy_(torch.maximum(self.top$i, h.detach().abs().max()))"),
    Piece("running_replaced", init="self.register_buffer('avg$i', torch.zeros($C))", glue="if self.training:\n    self.avg$i = 0.9 * self.avg$i + 0.1 * h.detach().flatten(0, -2).mean(0)\nh = h + self.avg$i"),
    Piece("counted", init="self.register_buffer('count$i', torch.zeros((), dtype=torch.long))", glue="self.count$i += 1"),
    Piece("counted_samples", init="self.register_buffer('count$i', torch.zeros(()))", glue="self.count$i += h.shape[0]"),
    Piece("counted_scale", init="self.register_buffer('count$i', torch.zeros((), dtype=torch.long))", glue="if self.training:\n    self.count$i += 1\nh = h * (1 + 0.1 * self.count$i)"),
    Piece("own_random", init="self.rng$i = random.Random(3)", glue="h = h * (0.5 + self.rng$i.random())", weight=0.7),
    Piece("own_numpy", init="self.rng$i = np.random.default_rng(3)", glue="h = h * float(self.rng$i.uniform(0.5, 1.5))", weight=0.7),
    Piece("global_random", glue="if self.training and random.random() < 0.5:\n    h = h * 0.5", weight=0.7),
    Piece("global_numpy", glue="h = h * np.random.uniform(0.5, 1.5)", weight=0.7),
    Piece("layer_drop", init="self.lin$i = nn.Linear($C, $C)", glue="if not self.training or random.random() < 0.7:\n    h = h + self.lin$i(h)", weight=0.7),
    Piece("own_generator", init="self.gen$i = torch.Generator().manual_seed(3)", glue="h = h * (1 + torch.rand(h.shape[-1], generator=self.gen$i).to(h))", weight=0.5),
    Piece("iterator", init="self.it$i = itertools.cycle([0.5, 1.0, 1.5])", glue="h = h * next(self.it$i)", weight=0.5),
    Piece("counter_object", init="self.tally$i = collections.Counter()", glue="self.tally$i[h.shape[0]] += 1"),
    Piece("defaultdict", init="self.seen$i = collections.defaultdict(list)", glue="self.seen$i[self.training].append(h.shape[0])"),
    Piece("deque", init="self.last$i = collections.deque(maxlen=2)", glue="self.last$i.append(float(len(self.last$i)))\nh = h * (1 + 0.1 * sum(self.last$i))"),
    Piece("deep_state", init="self.deep$i = {'a': {'b': {'c': {'d': [0]}}}}", glue="self.deep$i['a']['b']['c']['d'][0] += 1"),
    Piece("slots", top="class Slots:\n    __slots__ = ('n',)\n\n    def __init__(self):\n        self.n = 0\n", init="self.slots$i = Slots()", glue="self.slots$i.n += 1"),
    Piece("closure", init="""
            n = [0]
            def bump():
                n[0] += 1
                return n[0]
            self.bump$i, self.n$i = bump, n
        """, glue="h = h * (1 + 0.1 * self.bump$i())", weight=0.5),
    Piece("lru_cache", top="@functools.lru_cache(None)\ndef table$i(n):\n    return torch.arange(n) / n\n", glue="h = h + table$i(h.shape[-1]).to(h)"),
    Piece("cached_attribute", init="self.cache$i = {}", glue="key = h.shape[1:]\nif key not in self.cache$i:\n    self.cache$i[key] = torch.linspace(0, 1, h.shape[-1]).to(h)\nh = h + self.cache$i[key]"),
    Piece("global_counter", top="COUNT = {'n': 0}\n", glue="COUNT['n'] += 1", weight=0.7),
    Piece("class_list", body="seen$i = []", glue="self.seen$i.append(h.shape[0])", weight=0.7),
    Piece("class_int", body="ran$i = 0", glue="type(self).ran$i += 1", weight=0.7),
    Piece("init_lazily", init="self.ready$i = False", glue="if not self.ready$i:\n    self.ready$i = True\n    self.off$i = 0.25\nh = h + self.off$i"),
    Piece("forward_hook", init="self.lin$i = nn.Linear($C, $C)\nself.lin$i.register_forward_hook(lambda m, a, o: o * 0.5)", glue="h = h + self.lin$i(h)"),
    Piece("pre_hook", init="self.lin$i = nn.Linear($C, $C)\nself.lin$i.register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))", glue="h = h + self.lin$i(h)"),
    Piece("hook_keeps", init="self.lin$i = nn.Linear($C, $C)\nself.acts$i = []\nself.lin$i.register_forward_hook(lambda m, a, o: self.acts$i.append(o.detach().mean()))", glue="h = h + self.lin$i(h)", weight=0.5),
    Piece("backward_hook", init="self.lin$i = nn.Linear($C, $C)\nself.back$i = [0]\nself.lin$i.register_full_backward_hook(lambda m, gi, go: self.back$i.__setitem__(0, self.back$i[0] + 1))", glue="h = h + self.lin$i(h)", weight=0.4),
    Piece("backward_hook_scales", init="self.lin$i = nn.Linear($C, $C)\nself.lin$i.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,) if gi[0] is not None else None)", glue="h = h + self.lin$i(h)", weight=0.5),
    Piece("parameter_hook", init="self.w$i = nn.Parameter(torch.eye($C))\nself.w$i.register_hook(lambda g: g * 0.5)", glue="h = h @ self.w$i", weight=0.7),
    Piece("parameter_hook_mask", init="self.w$i = nn.Parameter(torch.randn($C, $C) * 0.3)\nself.w$i.register_hook(lambda g: g.tril())", glue="h = h + h @ self.w$i", weight=0.7),
    Piece("parameter_hook_clip", init="self.w$i = nn.Parameter(torch.randn($C, $C) * 0.3)\nself.w$i.register_hook(lambda g: g / (1 + g.norm()))", glue="h = h + h @ self.w$i", weight=0.5),
    Piece("post_accumulate", init="self.w$i = nn.Parameter(torch.randn($C, $C) * 0.3)\nself.acc$i = [0]\nself.w$i.register_post_accumulate_grad_hook(lambda p: self.acc$i.__setitem__(0, self.acc$i[0] + 1))", glue="h = h + h @ self.w$i", weight=0.4),
    Piece("weight_clip_in_forward", init="self.lin$i = nn.Linear($C, $C)", glue="with torch.no_grad():\n    self.lin$i.weight.clamp_(-0.3, 0.3)\nh = h + self.lin$i(h)", weight=0.6),
    Piece("weight_data_in_forward", init="self.lin$i = nn.Linear($C, $C)", glue="if self.training:\n    self.lin$i.weight.data.mul_(0.99)\nh = h + self.lin$i(h)", weight=0.5),
    Piece("mask_buffer", init="self.w$i = nn.Parameter(torch.randn($C, $C) * 0.3)\nself.register_buffer('mk$i', torch.ones($C, $C).triu())", glue="h = h + h @ (self.w$i * self.mk$i)"),
    Piece("training_branch", glue="h = h * 0.9 if self.training else h"),
    Piece("eval_layer", init="self.bn$i = nn.BatchNorm1d($C)", glue="self.bn$i.eval()\nh = h + self.bn$i(h.flatten(0, -2)).view_as(h)", weight=0.6),
    Piece("frozen", init="self.fz$i = nn.Linear($C, $C).requires_grad_(False)", glue="h = h + self.fz$i(h)"),
    Piece("unused_layer", init="self.unused$i = nn.Linear($C, $C)", glue=""),
    Piece("queue", init="self.register_buffer('bank$i', torch.zeros(8, $C))\nself.at$i = 0", glue="""
            f = h.detach() if h.dim() == 2 else h.detach().mean(1)
            near = (f @ self.bank$i.t()).softmax(-1) @ self.bank$i
            h = h + (near if h.dim() == 2 else near.unsqueeze(1))
            if self.training:
                n = min(len(f), 8 - self.at$i)
                self.bank$i[self.at$i:self.at$i + n] = f[:n]
                self.at$i = (self.at$i + n) % 8
        """, weight=0.6),
)  # fmt: skip

# Of the LightningModule.
OUTER = (
    Piece("epoch_branch", glue="if self.training and self.current_epoch >= 1:\n    h = h * 0.5", at="net"),
    Piece("step_branch", glue="if self.training and self.global_step >= 1:\n    h = h * 0.5", at="net"),
    Piece("step_mixing", glue="if self.training and self.global_step >= 1:\n    h = h - h.mean(0, keepdim=True)", at="net", weight=0.7),
    Piece("step_scale", glue="h = h * (1 + 0.1 * self.global_step)", at="net"),
    Piece("step_layer", init="self.late$i = nn.Linear($C, $C)", glue="if self.training and self.global_step >= 1:\n    h = h + self.late$i(h)", at="net", weight=0.7),
    Piece("sanity", glue="if self.trainer.sanity_checking:\n    h = h * 0.5", at="net", weight=0.5),
)  # fmt: skip

_TEACHER = """
self.teacher$i = nn.Linear($C, $C)
self.student$i = nn.Linear($C, $C)
self.teacher$i.load_state_dict(self.student$i.state_dict())
self.teacher$i.requires_grad_(False)
"""
_UPDATE = """
with torch.no_grad():
    for a, b in zip(self.teacher$i.parameters(), self.student$i.parameters()):
        a.mul_(0.9).add_(b.detach(), alpha=0.1)
"""

# Of the step.
EXTRAS = (
    Piece("losses_kept", init="self.losses = []", after="self.losses.append(loss.detach())"),
    Piece("losses_items", init="self.items = []", after="self.items.append(loss.item())"),
    Piece("loss_ema", init="self.ema = 0.0", after="self.ema = 0.9 * self.ema + 0.1 * loss.item()"),
    Piece("loss_ema_used", init="self.ema = 1.0", after="self.ema = 0.9 * self.ema + 0.1 * loss.item()\nloss = loss / self.ema", weight=0.7),
    Piece("loss_ema_tensor", init="self.register_buffer('ema_t', torch.ones(()))", after="self.ema_t.mul_(0.9).add_(loss.detach() * 0.1)\nloss = loss / self.ema_t", weight=0.7),
    Piece("best", init="self.best = float('inf')", after="if loss.item() < self.best:\n    self.best = loss.item()"),
    Piece("outputs_kept", init="self.outs = []", after="self.outs.append(out.detach())", hooks={"on_train_epoch_end": "self.log('outs', torch.cat(self.outs).mean())\nself.outs.clear()"}),
    Piece("outputs_kept_on", init="self.outs = []", after="self.outs.append((out.detach().argmax(-1), y))"),
    Piece("output_dict", init="self.table = {}", after="self.table[batch_idx] = out.detach().mean()"),
    Piece("history", init="self.history = collections.defaultdict(list)", after="self.history['loss'].append(float(loss))\nself.history['size'].append(len(x))"),
    Piece("numpy_kept", init="self.array = np.zeros(4)", after="self.array[batch_idx % 4] += loss.item()"),
    Piece("steps_counted", init="self.count = 0", after="self.count += 1"),
    Piece("samples_counted", init="self.samples = 0", after="self.samples += x.shape[0]"),
    Piece("class_steps", body="steps_seen = []", after="self.steps_seen.append(batch_idx)"),
    Piece("class_losses", body="losses_seen = []", after="self.losses_seen.append(loss.detach())", weight=0.7),
    Piece("global_steps", top="STEPS = []\n", after="STEPS.append(batch_idx)", weight=0.7),
    Piece("global_losses", top="GLOBAL = {}\n", after="GLOBAL[batch_idx] = loss.item()", weight=0.7),
    Piece("rng_scale", init="self.rng = np.random.default_rng(1)", before="x = x * int(self.rng.integers(1, 2))", after="loss = loss * float(self.rng.uniform(0.5, 1.5))"),
    Piece("random_choice", before="lam = random.choice([0.5, 1.0, 1.5])", after="loss = loss * lam"),
    Piece("numpy_beta", before="lam = float(np.random.beta(1.0, 1.0))", after="loss = loss * (1 + lam)"),
    Piece("step_count", init="self.ticks = itertools.count()", after="loss = loss * (1 + 0.1 * next(self.ticks))", weight=0.7),
    Piece("batch_idx_scale", after="loss = loss * (1 + 0.1 * batch_idx)"),
    Piece("step_warmup", after="loss = loss * min(1.0, (self.global_step + 1) / 3)"),
    Piece("l2", after="loss = loss + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())"),
    Piece("l2_named", after="loss = loss + 1e-3 * sum(p.norm() for n, p in self.named_parameters() if n.endswith('weight'))"),
    Piece("l1_head", after="loss = loss + 1e-2 * self.head.weight.abs().mean()"),
    Piece("orthogonal_head", after="g = self.head.weight @ self.head.weight.t()\nloss = loss + 1e-3 * (g - torch.eye(len(g)).to(g)).pow(2).sum()"),
    Piece("out_penalty", after="loss = loss + 1e-2 * out.pow(2).mean()"),
    Piece("out_sum_penalty", after="loss = loss + 1e-3 * out.abs().sum()"),
    Piece("out_batch_penalty", after="loss = loss + 1e-2 * out.mean(0).pow(2).sum()"),
    Piece("confidence", after="loss = loss - 1e-2 * out.softmax(-1).max(-1).values.mean()"),
    Piece("loss_clamped", after="loss = loss.clamp(max=2.0) + 0.1 * loss"),
    Piece("loss_power", after="loss = loss + 0.1 * loss ** 2"),
    Piece("loss_flood", after="loss = (loss - 0.5).abs() + 0.5"),
    Piece("loss_if", after="if loss > 1.5:\n    loss = 0.5 * loss", weight=0.6),
    Piece("loss_over_itself", after="loss = loss / (loss.detach() + 1e-3)"),
    Piece("loss_to_python", after="loss = loss * (1 + math.tanh(float(loss)))", weight=0.6),
    Piece("skipped_batch", after="if batch_idx == 1:\n    return None", weight=0.5),
    Piece("nan_guard", after="loss = torch.nan_to_num(loss)"),
    Piece("mask_count_logged", after="self.log('kept', m.double().mean())"),
    Piece("logged_twice", after="self.log('z', out.detach().mean(), on_step=True, on_epoch=True)"),
    Piece("logged_max", after="self.log('top', out.detach().max(), reduce_fx='max', on_step=False, on_epoch=True)"),
    Piece("logged_sum", after="self.log('total', float(len(x)), reduce_fx='sum', on_step=False, on_epoch=True)"),
    Piece("logged_item", after="self.log('item', loss.item() * 2, batch_size=len(x), on_epoch=True)"),
    Piece("logged_dict", after="self.log_dict({'a': out.detach().std(), 'b': y.double().mean()})"),
    Piece("logged_state", after="self.log('lr', self.optimizers().param_groups[0]['lr'])"),
    Piece("logged_norm", after="self.log('wn', torch.stack([p.detach().norm() for p in self.parameters()]).norm())"),
    Piece("mean_metric", init="self.mean = torchmetrics.MeanMetric()", after="self.mean.update(loss.detach(), len(x))", hooks={"on_train_epoch_end": "self.log('mm', self.mean.compute())\nself.mean.reset()"}),
    Piece("mean_metric_weights", init="self.mean_w = torchmetrics.MeanMetric()", after="self.mean_w(out.detach().flatten(1).mean(1), w)\nself.log('mw', self.mean_w)"),
    Piece("cat_metric", init="self.cats = torchmetrics.CatMetric()", after="self.cats.update(out.detach().flatten(1).sum(1))"),
    Piece("sum_metric_value", init="self.sums = torchmetrics.SumMetric()", after="self.log('sm', self.sums(w))"),
    Piece("teacher", init=_TEACHER, glue="""
            s = self.student$i(h)
            with torch.no_grad():
                t = self.teacher$i(h)
            h = h + s - t
        """, hooks={"on_train_batch_end": _UPDATE}, at="net"),
    Piece("teacher_in_step", init=_TEACHER, glue="h = h + self.student$i(h) - self.teacher$i(h.detach())", after=_UPDATE, at="net", weight=0.7),
    Piece("ema_weights", hooks={"on_train_start": "self.shadow = {n: p.detach().clone() for n, p in self.head.named_parameters()}", "on_train_batch_end": "for n, p in self.head.named_parameters():\n    self.shadow[n].lerp_(p.detach(), 0.1)"}, weight=0.6),
    Piece("deepcopy_target", init="self.tgt$i = copy.deepcopy(self.head)\nself.tgt$i.requires_grad_(False)", hooks={"on_train_batch_end": "if batch_idx % 2:\n    self.tgt$i.load_state_dict(self.head.state_dict())"}, glue="", after="loss = loss + 1e-2 * (self.head.weight - self.tgt$i.weight).pow(2).sum()"),
    Piece("unfreeze", hooks={"on_fit_start": "self.emb.requires_grad_(False)", "on_train_epoch_start": "if self.current_epoch == 1:\n    self.emb.requires_grad_(True)"}, weight=0.5),
    Piece("grad_norms", init="self.norms = []", hooks={"on_before_optimizer_step": "self.norms.append(torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm().item())"}, weight=0.7),
    Piece("grad_logged", hooks={"on_before_optimizer_step": "for n, p in self.named_parameters():\n    if p.grad is not None and n.startswith('head'):\n        self.log('g_' + n.replace('.', '_'), p.grad.norm())"}, weight=0.7),
    Piece("grad_scaled", hooks={"on_after_backward": "for p in self.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)"}, weight=0.7),
    Piece("grad_noise_free", hooks={"on_after_backward": "for p in self.parameters():\n    if p.grad is not None:\n        torch.nan_to_num_(p.grad)"}, weight=0.7),
    Piece("grad_centered", hooks={"on_before_optimizer_step": "for p in self.parameters():\n    if p.grad is not None and p.dim() > 1:\n        p.grad.sub_(p.grad.mean(0, keepdim=True))"}, weight=0.6),
    Piece("grad_frozen_rows", hooks={"on_after_backward": "if self.head.weight.grad is not None:\n    self.head.weight.grad[0] = 0"}, weight=0.6),
    Piece("weights_clipped", hooks={"on_train_batch_end": "with torch.no_grad():\n    for p in self.parameters():\n        p.clamp_(-0.5, 0.5)"}, weight=0.7),
    Piece("weights_normed", hooks={"on_train_batch_end": "with torch.no_grad():\n    self.head.weight.div_(1 + self.head.weight.norm(dim=1, keepdim=True))"}, weight=0.7),
    Piece("weights_data", hooks={"on_train_batch_end": "self.head.weight.data = self.head.weight.data * 0.9"}, weight=0.5),
    Piece("weights_pruned", hooks={"on_train_start": "self.prune_mask = (self.head.weight.abs() > 0.1).to(self.head.weight)", "on_train_batch_end": "with torch.no_grad():\n    self.head.weight.mul_(self.prune_mask)"}, weight=0.5),
    Piece("rewound", hooks={"on_fit_start": "self.start = copy.deepcopy(self.head.state_dict())", "on_train_epoch_start": "if self.current_epoch == 1:\n    self.head.load_state_dict(self.start)"}, weight=0.5),
    Piece("own_clipping", net={"configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None)": "self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm='norm')"}, weight=0.7),
    Piece("own_backward", net={"backward(self, loss)": "(loss * 2).backward()"}, weight=0.4),
    Piece("zero_grad_set", net={"optimizer_zero_grad(self, epoch, batch_idx, optimizer)": "optimizer.zero_grad(set_to_none=False)"}, weight=0.5),
    Piece("lr_by_hand", hooks={"on_train_batch_start": "for g in self.optimizers().param_groups:\n    g['lr'] = g['lr'] * 0.9"}, weight=0.7),
    Piece("early_stop", after="if batch_idx == 1:\n    self.trainer.should_stop = True", weight=0.5),
    Piece("stop_by_loss", hooks={"on_train_batch_end": "if outputs['loss'] > 1e6:\n    self.trainer.should_stop = True"}),
    Piece("stop_epoch", hooks={"on_train_batch_start": "if batch_idx == 2:\n    return -1"}, weight=0.5),
    Piece("batch_written", before="x = x.mul_(2) if x.is_floating_point() else x.add_(0)", weight=0.6),
    Piece("augmented", before="x = x.flip(-1)"),
    Piece("augmented_batch", before="x = torch.cat([x, x.flip(-1)])\ny = torch.cat([y, y])\nw, m = torch.cat([w, w]), torch.cat([m, m])", weight=0.7),
    Piece("half_batch", before="x, y, w, m = x[:2], y[:2], w[:2], m[:2]", weight=0.6),
    Piece("shuffled", before="order = torch.arange(len(x), device=x.device).flip(0)\nx, y, w, m = x[order], y[order], w[order], m[order]", weight=0.7),
    Piece("mixed_inputs", before="x = 0.7 * x + 0.3 * x.roll(1, 0) if x.is_floating_point() else x", weight=0.6),
    Piece("sorted_lengths", before="order = y.flatten(1).double().sum(1).argsort(stable=True) if y.dim() > 1 else y.argsort(stable=True)\nx, y, w, m = x[order], y[order], w[order], m[order]", weight=0.6),
    Piece("batch_standardised", before="x = (x - x.mean(0)) / (x.std(0) + 1) if x.is_floating_point() else x", weight=0.6),
    Piece("labels_set", after="self.log('labels', float(len(set(y.flatten().tolist()))))", weight=0.7),
    Piece("shape_assert", before="assert x.shape[0] == y.shape[0] and x.dim() >= 2"),
    Piece("two_passes", after="again = self(x)\nloss = loss + 0.1 * (again - out.detach()).pow(2).mean() + 0.1 * again.mean()", weight=0.8),
    Piece("adversarial", after="""
            if x.is_floating_point() and torch.is_grad_enabled():
                z = x.detach().clone().requires_grad_(True)
                (g,) = torch.autograd.grad(self(z).pow(2).mean(), z)
                loss = loss + 0.1 * self(x + 0.1 * g.sign().detach()).pow(2).mean()
        """, weight=0.5),
    Piece("eval_pass", after="self.eval()\nwith torch.no_grad():\n    z = self(x)\nself.train()\nself.log('ev', z.mean())", weight=0.6),
    Piece("no_grad_pass", after="with torch.no_grad():\n    z = self(x)\nloss = loss + 0.1 * (out - z).pow(2).mean() + 0.1 * z.mean() * loss", weight=0.8),
    Piece("callback_counts", top="class Counts(L.Callback):\n    def __init__(self):\n        self.n = []\n\n    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):\n        module.counted = getattr(module, 'counted', 0) + 1\n        self.n.append(float(outputs['loss']))\n        module.log('cb', float(len(self.n)))\n", options={"callbacks": "Counts()"}),
    Piece("callback_swa", options={"callbacks": "L.pytorch.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)"}, weight=0.3),
    Piece("callback_accumulation", options={"callbacks": "L.pytorch.callbacks.GradientAccumulationScheduler({0: 2, 1: 1})"}, weight=0.5),
    Piece("callback_stopping", options={"callbacks": "L.pytorch.callbacks.EarlyStopping('loss', patience=1, min_delta=1.0)"}, weight=0.5),
    Piece("callback_averaging", options={"callbacks": "L.pytorch.callbacks.WeightAveraging()"}, weight=0.3),
)  # fmt: skip
