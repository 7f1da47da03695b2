"""Optimizers and their schedules, torch's and some written by hand."""

from __future__ import annotations

from tests.fuzz.piece import Piece


def _optimizer(name: str, lines: str, top: str = "", weight: float = 1.0, **more: dict[str, str]) -> Piece:
    return Piece(name, net={"configure_optimizers(self)": lines, **more.get("net", {})}, top=top, weight=weight,
                 hooks=more.get("hooks", {}))  # fmt: skip


def _own(body: str, name: str = "Own") -> str:
    return f"""
class {name}(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05):
        super().__init__(params, dict(lr=lr))

{body}
"""


_CENTRAL = _own("""
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    g = p.grad
                    if g.dim() > 1:
                        g = g - g.mean(dim=tuple(range(1, g.dim())), keepdim=True)
                    p.add_(g, alpha=-group["lr"])
        return loss
""")
_TRUST = _own("""
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["m"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad)
                ratio = (p.norm() / (state["m"].norm() + 1e-2)).clamp(max=10.0)
                p.sub_(ratio * state["m"], alpha=group["lr"] * 0.1)
        return loss
""")
_ELEMENTWISE = _own("""
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        v = state.setdefault("v", torch.zeros_like(p))
                        v.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                        p.data.addcdiv_(p.grad, v.sqrt() + 1e-2, value=-group["lr"])
        return loss
""")
_SAM = _own("""
    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm() + 1e-3
        moved = [p.grad * 0.05 / norm for p in params]
        for p, e in zip(params, moved):
            p.add_(e)
        closure()
        for p, e in zip(params, moved):
            p.sub_(e)
            p.sub_(p.grad, alpha=0.05)
        return loss
""")
_GLOBAL = _own("""
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        total = torch.stack([p.grad.pow(2).sum() for p in params]).sum().sqrt()
        for p in params:
            p.sub_(p.grad / (1 + total), alpha=self.param_groups[0]["lr"])
        return loss
""")
_LOOKAHEAD = _own("""
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "slow" not in state:
                    state["slow"], state["k"] = p.clone(), 0
                p.sub_(p.grad, alpha=group["lr"])
                state["k"] += 1
                if state["k"] % 2 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])
        return loss
""")
_FLAT = _own("""
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in params])
        flat = flat / (flat.abs().max() + 1e-2)
        at = 0
        for p in params:
            p.sub_(flat[at:at + p.numel()].view_as(p), alpha=self.param_groups[0]["lr"])
            at += p.numel()
        return loss
""")
_GROUPS = """
decay = [p for p in self.parameters() if p.requires_grad and p.dim() > 1]
plain = [p for p in self.parameters() if p.requires_grad and p.dim() <= 1]
groups = [dict(params=decay, weight_decay=0.1), dict(params=plain, weight_decay=0.0)]
"""
_TRAINED = "params = [p for p in self.parameters() if p.requires_grad]\n"

PLAIN_OPTIMIZER = _optimizer("sgd", "return torch.optim.SGD(self.parameters(), lr=0.1)", weight=2)
OPTIMIZERS = (
    PLAIN_OPTIMIZER,
    _optimizer("momentum", "return torch.optim.SGD(self.parameters(), 0.05, 0.9, weight_decay=0.01)", weight=2),
    _optimizer("nesterov", "return torch.optim.SGD(self.parameters(), 0.05, 0.9, nesterov=True)"),
    _optimizer("adam", "return torch.optim.Adam(self.parameters(), lr=0.01)", weight=3),
    _optimizer("adamw", "return torch.optim.AdamW(self.parameters(), lr=0.01)", weight=4),
    _optimizer("amsgrad", "return torch.optim.AdamW(self.parameters(), lr=0.01, amsgrad=True, foreach=False)"),
    _optimizer("rmsprop", "return torch.optim.RMSprop(self.parameters(), lr=0.005, centered=True, eps=1e-4)"),
    _optimizer("adagrad", "return torch.optim.Adagrad(self.parameters(), lr=0.05, eps=1e-4)"),
    _optimizer("adadelta", "return torch.optim.Adadelta(self.parameters(), eps=1e-4)"),
    _optimizer("adamax", "return torch.optim.Adamax(self.parameters(), lr=0.01, eps=1e-4)", weight=0.7),
    _optimizer("nadam", "return torch.optim.NAdam(self.parameters(), lr=0.01)", weight=0.7),
    _optimizer("radam", "return torch.optim.RAdam(self.parameters(), lr=0.01)", weight=0.7),
    _optimizer("asgd", "return torch.optim.ASGD(self.parameters(), lr=0.05, t0=1)", weight=0.7),
    _optimizer("adafactor", "return torch.optim.Adafactor(self.parameters(), lr=0.05)", weight=0.7),
    _optimizer("lbfgs", "return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3)", weight=0.5),
    _optimizer("central", "return Own(self.parameters())", _CENTRAL),
    _optimizer("trust", "return Own(self.parameters())", _TRUST),
    _optimizer("own_elementwise", "return Own(self.parameters())", _ELEMENTWISE),
    _optimizer("own_global", "return Own(self.parameters())", _GLOBAL),
    _optimizer("own_flat", "return Own(self.parameters())", _FLAT),
    _optimizer("lookahead", "return Own(self.parameters())", _LOOKAHEAD),
    _optimizer("sam", "return Own(self.parameters())", _SAM, weight=0.7),
    _optimizer("groups", _GROUPS + "return torch.optim.AdamW(groups, lr=0.01)", weight=2),
    _optimizer(
        "named_groups",
        """
        groups = {}
        for name, p in self.named_parameters():
            groups.setdefault(name.split('.')[0], []).append(p)
        return torch.optim.SGD([dict(params=ps, lr=0.1 / (k + 1)) for k, ps in enumerate(groups.values())])
        """,
    ),
    _optimizer(
        "step_lr",
        """
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        """,
    ),
    _optimizer(
        "warmup",
        """
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 3))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        """,
        weight=2,
    ),
    _optimizer(
        "one_cycle",
        """
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        total = int(self.trainer.estimated_stepping_batches) + 1
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        """,
    ),
    _optimizer(
        "plateau",
        """
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}
        """,
    ),
    _optimizer(
        "own_optimizer_step",
        _TRAINED + "return torch.optim.SGD(params, lr=0.1)",
        net={
            "optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure)": """
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 3)
                optimizer.step(closure=optimizer_closure)
            """
        },
    ),
    _optimizer(
        "every_other_step",
        "return torch.optim.SGD(self.parameters(), lr=0.1)",
        net={
            "optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure)": """
                if batch_idx % 2 == 0:
                    optimizer.step(closure=optimizer_closure)
                else:
                    optimizer_closure()
            """
        },
        weight=0.5,
    ),
)
