"""Every optimizer steps on sharded parameters as on one device, or says by name that it can't."""

from __future__ import annotations

import copy
import functools
import io
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_par import TensorParallelStrategy
from lightning_par.mesh.ledger import ledger
from lightning_par.optim.torch_optimizers import BY_ELEMENT, BY_PARAMETER, runs_torchs_step
from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.differences import differences
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

STEPS = 4


class Net(LightningModule):
    """An embedding, a block and a head; 11 words and 10 features don't split evenly over every number of ranks."""

    def __init__(self, optimizer: str, matrices: bool = False, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.optimizer = optimizer
        self.embedding = nn.Embedding(11, 8, sparse=sparse)
        self.up = nn.Linear(8, 10, bias=not matrices)
        self.down = nn.Linear(10, 8, bias=not matrices)
        self.norm = nn.Identity() if matrices else nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=not matrices)
        self.listed = list(self.parameters())  # as some keep them for `configure_optimizers`

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.embedding(batch[:, :-1])
        h = self.norm(h + self.down(F.gelu(self.up(h))))
        return F.cross_entropy(self.head(h).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self)


class Lamb(Optimizer):
    """A trust ratio from norms of whole tensors; without weight decay the update is elementwise, as in common code."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 0.1)
                update, ratio = average + group["weight_decay"] * p, 1.0
                if group["weight_decay"]:
                    ratio = (p.norm() / update.norm()).clamp(max=10.0).item()
                p.sub_(update * ratio, alpha=group["lr"])
        return loss


class Global(Optimizer):
    """A step size found from all parameters together, as in Prodigy and D-Adaptation; at first it does nothing yet."""

    def __init__(self, params: Any, lr: float = 1.0, d: float = 1e-3) -> None:
        super().__init__(params, dict(lr=lr, d=d, travelled=0.0))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found, size = 0.0, 0.0
        d = self.param_groups[0]["d"]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("start", p.clone())
                found += torch.dot(p.grad.flatten(), (state["start"] - p).flatten()).item()
                size += p.grad.abs().sum().item()
                p.sub_(p.grad.sign(), alpha=group["lr"] * d)
        for group in self.param_groups:
            group["travelled"] += found
            group["d"] = max(d, 2 * group["travelled"] / size)
        return loss


class Lookahead(Optimizer):
    """Wraps another optimizer, shares its param groups, and never calls `Optimizer.__init__`."""

    def __init__(self, inner: Optimizer, k: int = 2) -> None:
        self.inner, self.k, self.count = inner, k, 0
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # as timm's does
        self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = {}, {}
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for slow, p in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)
        return loss


def _named(cls: str, **options: Any) -> Callable[[Net], Any]:
    return lambda net: getattr(torch.optim, cls)(net.parameters(), **options)


def _groups(net: Net) -> Any:
    """Three groups, two learning rates, a frozen parameter, and a list that the module kept from before the split."""
    net.head.bias.requires_grad_(False)
    matrices = [p for p in net.listed if p.ndim > 1]
    return torch.optim.AdamW(
        [
            {"params": matrices[:2], "weight_decay": 0.1},
            {"params": matrices[2:], "weight_decay": 0.2, "lr": 3e-2},
            {"params": [p for p in net.listed if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def _lamb_groups(net: Net) -> Any:
    """The first group acts elementwise, the second does not."""
    first, second = [p for p in net.listed if p.ndim == 1], [p for p in net.listed if p.ndim > 1]
    return Lamb([{"params": first}, {"params": second, "weight_decay": 0.1}], lr=0.1)


def _warm(net: Net) -> Any:
    """The first step has a learning rate of zero."""
    optimizer = Lamb(net.parameters(), lr=0.1, weight_decay=0.1)
    return [optimizer], [
        {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: i / 3), "interval": "step"}
    ]


def _one_cycle(net: Net) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=STEPS + 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


OPTIMIZERS: dict[str, Callable[[Net], Any]] = {
    "sgd": _named("SGD", lr=0.1),
    "sgd_momentum": _named("SGD", lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd_nesterov": _named("SGD", lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd_maximize": _named("SGD", lr=0.01, maximize=True),
    "sgd_fused": _named("SGD", lr=0.1, momentum=0.9, fused=True),
    "adam": _named("Adam", lr=0.01),
    "adam_l2": _named("Adam", lr=0.01, weight_decay=0.1),
    "adam_fused": _named("Adam", lr=0.01, fused=True),
    "adamw": _named("AdamW", lr=0.01),
    "adamw_foreach": _named("AdamW", lr=0.01, foreach=True),
    "adamw_fused": _named("AdamW", lr=0.01, fused=True, amsgrad=True),
    "adamw_amsgrad": _named("AdamW", lr=0.01, amsgrad=True),
    "adamw_maximize": _named("AdamW", lr=0.01, maximize=True),
    "adamw_tensor_lr": lambda net: torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01)),
    "adamax": _named("Adamax", lr=0.01),
    "nadam": _named("NAdam", lr=0.01),
    "radam": _named("RAdam", lr=0.01),
    "adagrad": _named("Adagrad", lr=0.1, lr_decay=0.1),
    "adagrad_initial": _named("Adagrad", lr=0.1, initial_accumulator_value=0.5),
    "adadelta": _named("Adadelta", lr=1.0),
    "rmsprop": _named("RMSprop", lr=0.01, momentum=0.9, centered=True),
    "rprop": _named("Rprop", lr=0.01),
    "asgd": _named("ASGD", lr=0.1, t0=2),
    "adafactor": _named("Adafactor", lr=0.1),
    "lbfgs": _named("LBFGS", lr=0.1, max_iter=3),
    "lbfgs_wolfe": _named("LBFGS", lr=1.0, max_iter=3, line_search_fn="strong_wolfe"),
    "muon": _named("Muon", lr=0.1),
    "sparse_adam": lambda net: torch.optim.SparseAdam([net.embedding.weight], lr=0.1),
    "groups": _groups,
    "lamb": lambda net: Lamb(net.parameters(), lr=0.1, weight_decay=0.1),
    "lamb_elementwise": lambda net: Lamb(net.parameters(), lr=0.1),
    "lamb_groups": _lamb_groups,
    "lamb_warm": _warm,
    "global": lambda net: Global(net.parameters()),
    "lookahead": lambda net: Lookahead(torch.optim.AdamW(net.parameters(), lr=0.01)),
    "lookahead_adafactor": lambda net: Lookahead(torch.optim.Adafactor(net.parameters(), lr=0.1)),
    "one_cycle": _one_cycle,
}
LOCAL = {
    "sgd", "sgd_momentum", "sgd_nesterov", "sgd_maximize", "sgd_fused", "adam", "adam_l2", "adam_fused", "adamw",
    "adamw_foreach", "adamw_fused", "adamw_amsgrad", "adamw_maximize", "adamw_tensor_lr", "adamax", "nadam", "radam",
    "adagrad", "adagrad_initial", "adadelta", "rmsprop", "rprop", "asgd", "groups", "lamb_elementwise", "one_cycle",
}  # fmt: skip


class Watch(Callback):
    """Notes whether the user's own parameters are in the optimizer after each step, and its state sharded as they."""

    def __init__(self) -> None:
        self.back = True
        self.split = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.split = sum(isinstance(p, ShardedTensor) for p in pl_module.parameters())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        own = {id(p) for p in pl_module.parameters()}
        for optimizer in trainer.optimizers:
            self.back &= all(id(p) in own for group in optimizer.param_groups for p in group["params"])
            self.back &= all(id(p) in own for p in optimizer.state)
            for p in pl_module.parameters() if isinstance(trainer.strategy, TensorParallelStrategy) else ():
                alike = [x for x in optimizer.state.get(p, {}).values() if isinstance(x, Tensor) and x.shape == p.shape]
                self.back &= all(isinstance(x, ShardedTensor) == isinstance(p, ShardedTensor) for x in alike)


def _train(
    name: str, layout: dict[str, int] | None, net: Net | None = None, precision: Any = "64-true", **options: Any
) -> dict[str, Any]:
    net = net or Net(name, matrices=name == "muon", sparse=name == "sparse_adam").double()
    resume = options.pop("resume", None)
    write = options.pop("write", None)
    epochs, batches = options.pop("epochs", 1), options.pop("batches", STEPS)
    watch = Watch()
    strategy: dict[str, Any] = {} if layout is None else dict(strategy=TensorParallelStrategy(**layout))
    callbacks = [watch, *options.pop("callbacks", [])]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught, ledger() as moved:
        warnings.simplefilter("always")
        trainer = Trainer(
            accelerator="cpu",
            devices=layout["tensor_parallel_size"] if layout else 1,
            max_steps=options.pop("max_steps", STEPS if "lbfgs" not in name else -1),
            max_epochs=epochs,
            callbacks=callbacks,
            default_root_dir=folder,
            **strategy,
            **{**QUIET, **(dict(precision=precision) if isinstance(precision, str) else dict(plugins=[precision]))},
            **options,
        )
        generator = torch.Generator().manual_seed(5)
        data = torch.randint(0, 11, (4 * STEPS, 7), generator=generator)
        error = ""
        try:
            trainer.fit(net, DataLoader(data[: 4 * batches], batch_size=4), ckpt_path=resume)
            trainer.save_checkpoint(Path(folder, "a.ckpt"))
            if write is not None:
                trainer.save_checkpoint(write)
        except Exception as raised:
            if layout is None:
                raise
            error = f"{type(raised).__name__}: {raised}"
        saved = Path(folder, "a.ckpt")
        checkpoint = torch.load(saved, weights_only=False) if saved.exists() else {}
    return dict(
        checkpoint=checkpoint,
        moved=moved.sent(purpose="optimizer"),
        back=watch.back,
        split=watch.split,
        error=error,
        warned=[str(w.message) for w in caught if "lr_scheduler.step" in str(w.message)],
        whole=all(type(p) is nn.Parameter for p in net.parameters()),
        weights={k: v.clone() for k, v in net.state_dict().items()},
    )


QUIET: dict[str, Any] = dict(
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)


def _train_all(names: list[str], layout: dict[str, int] | None) -> dict[str, dict[str, Any]]:
    return {name: _train(name, layout) for name in names}


@pytest.fixture(scope="module")
def trained(pool: Pool, asked: Callable[[str], list[Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Every optimizer on one device, and on two ranks."""
    names = [row["name"] for row in asked("test_an_optimizer_equals_one_device")]
    (one,) = pool.run(1, _train_all, names, None)
    return one, pool.run(2, _train_all, names, dict(tensor_parallel_size=2))


@slow(
    but=[
        "adagrad_initial",
        "adamw",
        "adamw_fused",
        "asgd",
        "groups",
        "lamb_elementwise",
        "lamb_warm",
        "lbfgs",
        "lookahead",
        "muon",
        "one_cycle",
        "sgd",
    ]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_equals_one_device(name: str, trained: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    one, ranks = trained[0][name], [rank[name] for rank in trained[1]]
    assert [rank["error"] for rank in ranks] == ["", ""]
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert not differences(one["checkpoint"][part], ranks[0]["checkpoint"][part], 1e-9), part
    for rank in ranks:
        assert not differences(one["weights"], rank["weights"], 1e-9)
        assert rank["back"] and rank["whole"] and not rank["warned"] and rank["split"] >= 3
        assert rank["moved"] == 0 or name not in LOCAL, "an optimizer that treats each element by itself gathers"


RESUMED = ["adafactor", "lamb", "lamb_groups", "global", "asgd", "adagrad", "nadam", "muon", "one_cycle", "groups"]


def _save_half(folder: Path, layout: dict[str, int] | None) -> None:
    for name in RESUMED:
        _train(name, layout, batches=2, write=folder / f"{name}.ckpt")


def _resume_half(folder: Path, layout: dict[str, int] | None) -> dict[str, dict[str, Any]]:
    more: dict[str, Any] = dict(batches=2, epochs=2, max_steps=-1)
    return {name: _train(name, layout, resume=folder / f"{name}.ckpt", **more) for name in RESUMED}


@slow()
@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1), (2, 4)])
def test_state_of_any_kind_resumes_under_another_layout(writer: int, reader: int, pool: Pool, tmp_path: Path) -> None:
    layouts = {1: None, 2: dict(tensor_parallel_size=2), 4: dict(tensor_parallel_size=4)}
    pool.run(writer, _save_half, tmp_path, layouts[writer])
    other = pool.run(reader, _resume_half, tmp_path, layouts[reader])[0]
    (one,) = pool.run(1, _resume_half, tmp_path, None)
    for name in RESUMED:
        assert other[name]["error"] == "" and other[name]["checkpoint"]["global_step"] > 2
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
            assert not differences(one[name]["checkpoint"][part], other[name]["checkpoint"][part], 1e-9), (name, part)


class Late(Callback):
    """Adds a param group after the second batch, and gives the first one a weight decay after the third."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.head.weight.requires_grad_(False)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        (optimizer,) = trainer.optimizers
        if trainer.global_step == 2:
            pl_module.head.weight.requires_grad_(True)
            optimizer.add_param_group({"params": [pl_module.head.weight], "lr": 0.05})
        if trainer.global_step == 3:
            optimizer.param_groups[0]["weight_decay"] = 0.1


class Manual(Net):
    """Two optimizers, one elementwise and one not, and a state that goes through the user's hands after each step."""

    def __init__(self) -> None:
        super().__init__("")
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in (first, second):
            optimizer.step()
            plain = optimizer.optimizer
            plain.load_state_dict(copy.deepcopy(plain.state_dict()))

    def configure_optimizers(self) -> Any:
        body = [p for name, p in self.named_parameters() if "head" not in name]
        return [torch.optim.AdamW(body, lr=0.01), torch.optim.Adafactor(self.head.parameters(), lr=0.1)]


class Plateau(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "loss", "interval": "step"},
        }


def _lamb_late() -> Net:
    net = Net("")
    net.configure_optimizers = lambda: Lamb([p for p in net.listed if p is not net.head.weight])  # type: ignore
    return net


CASES: dict[str, Callable[[], tuple[Net, list[Callback]]]] = {
    "late_group": lambda: (_lamb_late(), [Late()]),
    "manual": lambda: (Manual(), []),
    "plateau": lambda: (Plateau(""), []),
}


def _train_case(case: str, layout: dict[str, int] | None) -> dict[str, Any]:
    net, callbacks = CASES[case]()
    return _train(case, layout, net=net.double(), callbacks=callbacks)


@long("4-manual")
@slow("2-manual", "4-late_group", "4-plateau", "2-late_group")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_users_do_with_optimizers_equals_one_device(case: str, ranks: int, pool: Pool) -> None:
    (one,) = pool.run(1, _train_case, case, None)
    results = pool.run(ranks, _train_case, case, dict(tensor_parallel_size=ranks))
    assert [rank["error"] for rank in results] == [""] * ranks
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert not differences(one["checkpoint"][part], results[0]["checkpoint"][part], 1e-9), part
    assert all(rank["split"] and rank["back"] and not rank["warned"] for rank in results)


class Overflow(Net):
    """The scaled gradient of one rank's part is infinite in the second step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 1e37 * self.up.weight[0].sum() if batch_idx == 1 else loss


def _overflow(name: str, layout: dict[str, int] | None) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return _train(name, layout, net=Overflow(name), precision=MixedPrecision("16-mixed", "cpu", scaler=scaler))


@slow("adamw")
@pytest.mark.parametrize("name", ["adamw_fused", "adamw", "adafactor"])
def test_a_scaler_skips_the_step_on_all_ranks_or_none(name: str, pool: Pool) -> None:
    (one,) = pool.run(1, _overflow, name, None)
    results = pool.run(2, _overflow, name, dict(tensor_parallel_size=2))
    assert [rank["error"] for rank in results] == ["", ""]
    assert results[0]["checkpoint"]["MixedPrecision"] == one["checkpoint"]["MixedPrecision"]
    a, b = one["checkpoint"]["optimizer_states"], results[0]["checkpoint"]["optimizer_states"]
    steps = [[float(state["step"]) for state in checkpoint[0]["state"].values()] for checkpoint in (a, b)]
    assert steps[0] == steps[1] == [STEPS - 1.0] * 9
    assert not differences(results[0]["weights"], results[1]["weights"], 0.0)


def _twice(layout: dict[str, int] | None) -> dict[str, Any]:
    """The user makes the optimizer once and gives it to two fits."""
    net = Net("").double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    _train("", layout, net=net)
    return _train("", layout, net=net)


def test_an_optimizer_may_serve_two_fits(pool: Pool) -> None:
    (one,) = pool.run(1, _twice, None)
    first, _ = pool.run(2, _twice, dict(tensor_parallel_size=2))
    for part in ("state_dict", "optimizer_states"):
        assert not differences(one["checkpoint"][part], first["checkpoint"][part], 1e-9), part


class Fails(Optimizer):
    """Raises in the middle of the third step, on rank 1 alone if so told."""

    def __init__(self, params: Any, rank: int | None) -> None:
        super().__init__(params, dict(lr=0.1))
        self.rank, self.steps = rank, 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure else None
        self.steps += 1
        if self.steps == 3 and self.rank in (None, torch.distributed.get_rank()):
            raise ValueError("in the step")
        return loss


class Raises(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ValueError("in the closure")
        return super().training_step(batch, batch_idx)


def _fail(where: str) -> tuple[str, bool, bool]:
    if where == "step":
        net = Net("").double()
        net.configure_optimizers = lambda: Fails(net.parameters(), None)  # type: ignore[method-assign]
    else:
        net = Raises("adafactor").double()
    ended = _train("", dict(tensor_parallel_size=2), net=net)
    optimizer = net.trainer.optimizers[0]
    own = {id(p) for p in net.parameters()}
    return ended["error"], all(id(p) in own for g in optimizer.param_groups for p in g["params"]), ended["whole"]


@pytest.mark.parametrize("where", ["step", "closure"])
def test_an_exception_leaves_the_users_parameters_in_the_groups(where: str, pool: Pool) -> None:
    for error, own, _ in pool.run(2, _fail, where):
        assert error == f"ValueError: in the {where}"
        assert own


class Asks(Callback):
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        (optimizer,) = trainer.optimizers
        state = optimizer.state_dict()
        self.found["shapes"] = [tuple(x["exp_avg"].shape) for x in state["state"].values()]
        self.found["sum"] = sum(x["exp_avg"].sum().item() for x in state["state"].values())
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)["state"].values()
        self.found["saved"] = [x["exp_avg"].clone() for x in saved]


def _ask(layout: dict[str, int] | None) -> dict[str, Any]:
    asks = Asks()
    _train("adamw", layout, callbacks=[asks])
    return asks.found


def test_the_state_dict_that_a_user_asks_for_is_whole_in_a_file(pool: Pool) -> None:
    (one,) = pool.run(1, _ask, None)
    for found in pool.run(2, _ask, dict(tensor_parallel_size=2)):
        assert found["shapes"] == one["shapes"]
        assert found["sum"] == pytest.approx(one["sum"], rel=1e-9)
        assert all(torch.allclose(x, y, rtol=1e-9, atol=0) for x, y in zip(found["saved"], one["saved"], strict=True))


def _own(cls: type[Optimizer]) -> tuple[bool, bool]:
    optimizer = cls([nn.Parameter(torch.ones(3, 2))])
    return tuple(runs_torchs_step(optimizer, optimizer.step, kinds) for kinds in (BY_ELEMENT, BY_PARAMETER))  # type: ignore


def test_each_of_torchs_optimizers_is_known() -> None:
    """A new one has to be read, and to find its place here."""
    classes = {name: getattr(torch.optim, name) for name in torch.optim.__all__}
    own = {name for name, cls in classes.items() if isinstance(cls, type) and issubclass(cls, Optimizer)}
    whole = {"Adafactor", "Muon", "SparseAdam"}
    found = {name: _own(classes[name]) for name in own - {"Optimizer"}}
    assert found == {name: (name not in whole | {"LBFGS"}, name != "LBFGS") for name in found}


class Renamed(torch.optim.AdamW):
    def __init__(self, params: Any, secret: float = 1.0) -> None:
        super().__init__(params, lr=0.1)
        self.secret = secret


class Overridden(torch.optim.AdamW):
    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)


class Closing(torch.optim.AdamW):
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        return super().step()


def test_code_of_the_users_in_a_step_is_found() -> None:
    assert _own(Renamed) == (True, True)
    assert _own(Overridden) == _own(Closing) == _own(Lamb) == (False, False)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps the step
    assert runs_torchs_step(optimizer, optimizer.step, BY_ELEMENT)
    wrapped = functools.wraps(optimizer.step)(lambda *args: None)
    assert not runs_torchs_step(optimizer, wrapped, BY_ELEMENT)
    optimizer._init_group = lambda *args: False
    assert not runs_torchs_step(optimizer, optimizer.step, BY_ELEMENT)
